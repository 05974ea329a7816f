"""The installed ONNX Runtime, or what to install."""

from __future__ import annotations

from types import ModuleType

from edge_spec.errors import MissingDependencyError


def import_onnxruntime() -> ModuleType:
    """Import ONNX Runtime.

    Raises:
        MissingDependencyError: it is not installed, or the installation is broken.
    """
    try:
        import onnxruntime
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # the extension module takes any exception for its own
            raise error.__cause__ from None
        raise MissingDependencyError(
            f"ONNX Runtime cannot be imported ({error}). Install one of: pip install 'edge-spec[cpu]', "
            "or for NVIDIA GPUs: pip install 'edge-spec[gpu]'."
        ) from error
    # Two wheels install this module. Removing one of them guts the other and leaves an empty package behind.
    if not hasattr(onnxruntime, "InferenceSession"):
        raise MissingDependencyError(
            "The installation of ONNX Runtime is incomplete. Uninstall both onnxruntime and onnxruntime-gpu, then "
            "install only one of: pip install 'edge-spec[cpu]', or for NVIDIA GPUs: pip install 'edge-spec[gpu]'."
        )
    module: ModuleType = onnxruntime
    return module
