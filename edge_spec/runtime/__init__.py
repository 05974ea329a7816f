"""The runtime: loads a pair bundle and generates with it, on numpy, ONNX Runtime, tokenizers and Jinja2 alone."""
