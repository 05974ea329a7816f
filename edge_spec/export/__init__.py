"""The export stage: a Hugging Face or GGUF checkpoint becomes a pair bundle of quantized ONNX graphs."""

from edge_spec.export.pair import ExportReport, export_pair

__all__ = ["ExportReport", "export_pair"]
