"""Whether graphs are such as the exporter writes, before ONNX Runtime sees them (docs/security.md)."""
