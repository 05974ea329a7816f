"""The options of ONNX Runtime's CUDA provider."""

from __future__ import annotations


def cuda_options(memory_limit: int | None, graphs: bool) -> dict[str, str]:
    """Options for one session, as ``onnxruntime.InferenceSession`` takes them beside the provider's name.

    Args:
        memory_limit: most bytes of the session's arena, which holds its weights and workspaces but not the KV cache;
            ``None`` for no limit.
        graphs: whether calls may be captured as CUDA graphs.

    Raises:
        ValueError: the limit is not positive.
    """
    if memory_limit is not None and memory_limit <= 0:
        raise ValueError(f"memory_limit is {memory_limit}, expected a positive number of bytes or None.")
    # By default the arena doubles each time it grows, and so takes up to twice what the plan has counted.
    options = {"arena_extend_strategy": "kSameAsRequested", "enable_cuda_graph": "1" if graphs else "0"}
    if memory_limit is not None:
        options["gpu_mem_limit"] = str(memory_limit)
    return options
