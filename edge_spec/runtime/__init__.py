"""The runtime: loads a pair bundle and generates with it. Needs numpy, ONNX Runtime and tokenizers only."""
