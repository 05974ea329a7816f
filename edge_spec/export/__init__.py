"""The export stage: a Hugging Face or GGUF checkpoint becomes a pair bundle of quantized ONNX graphs."""

from edge_spec.errors import MissingDependencyError

try:
    from edge_spec.export.add_draft import add_draft
    from edge_spec.export.add_head import add_head
    from edge_spec.export.pair import ExportReport, export_pair
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("edge_spec"):
        raise
    raise MissingDependencyError(
        f"Exporting needs the package {error.name!r}: pip install 'edge-spec[cpu,export]'."
    ) from error

__all__ = ["ExportReport", "add_draft", "add_head", "export_pair"]
