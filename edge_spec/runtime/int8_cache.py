"""Whether the installed ONNX Runtime takes a KV cache of 8-bit integers, found out by running a graph that has one."""

from __future__ import annotations

import functools

import numpy as np

from edge_spec.errors import ProviderError, RequestError
from edge_spec.manifest import CacheType, Manifest
from edge_spec.onnx_runtime import import_onnxruntime
from edge_spec.runtime.provider import CPU_PROVIDER

# One node, GroupQueryAttention with one head of 8 channels and an int8 cache. Kept as bytes, because the runtime does
# not depend on onnx. The tests build it again and compare.
INT8_ATTENTION_MODEL = bytes.fromhex(
    "08083aa3050aaf020a0571756572790a036b65790a0576616c75650a08706173745f6b65790a0a706173745f76616c75650a09736571"
    "6c656e735f6b0a15746f74616c5f73657175656e63655f6c656e6774680a000a000a000a000a000a057363616c650a057363616c6512"
    "08617474656e646564120b70726573656e745f6b6579120d70726573656e745f76616c7565221347726f75705175657279417474656e"
    "74696f6e2a1e0a0c6b5f7175616e745f74797065220b5045525f4348414e4e454ca001032a190a126b765f63616368655f6269745f77"
    "696474681808a001022a130a0c6b765f6e756d5f68656164731801a001022a100a096e756d5f68656164731801a001022a1e0a0c765f"
    "7175616e745f74797065220b5045525f4348414e4e454ca001033a0d636f6d2e6d6963726f736f6674120570726f62655a1b0a057175"
    "65727912120a100801120c0a0208010a0208010a0208085a190a036b657912120a100801120c0a0208010a0208010a0208085a1b0a05"
    "76616c756512120a100801120c0a0208010a0208010a0208085a220a08706173745f6b657912160a14080312100a0208010a0208010a"
    "0208020a0208085a240a0a706173745f76616c756512160a14080312100a0208010a0208010a0208020a0208085a170a097365716c65"
    "6e735f6b120a0a08080612040a0208015a1f0a15746f74616c5f73657175656e63655f6c656e67746812060a04080612005a1f0a0573"
    "63616c6512160a14080112100a0208010a0208010a0208010a020808621e0a08617474656e64656412120a100801120c0a0208010a02"
    "08010a02080862250a0b70726573656e745f6b657912160a14080312100a0208010a0208010a0208020a02080862270a0d7072657365"
    "6e745f76616c756512160a14080312100a0208010a0208010a0208020a02080842040a00101242110a0d636f6d2e6d6963726f736f66"
    "741001"
)


@functools.cache
def takes_int8_cache() -> bool:
    """Tell whether attention on the CPU provider computes with an int8 KV cache.

    Opening such a graph is not enough: ONNX Runtime 1.26 does that and then fails to run it.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    # A query of zeros sees both tokens alike, so what comes out is the mean of their values: 2 and, rounded, 1.
    cached = np.full((1, 1, 2, 8), 4, np.int8)
    feeds = {
        "query": np.zeros((1, 1, 8), np.float32),
        "key": np.zeros((1, 1, 8), np.float32),
        "value": np.full((1, 1, 8), 1.1, np.float32),
        "past_key": cached,
        "past_value": cached,
        "seqlens_k": np.array([1], np.int32),
        "total_sequence_length": np.array(2, np.int32),
        "scale": np.full((1, 1, 1, 8), 0.5, np.float32),
    }
    try:
        session = onnxruntime.InferenceSession(INT8_ATTENTION_MODEL, options, providers=[CPU_PROVIDER])
        (attended,) = session.run(["attended"], feeds)
    except Exception:  # ONNX Runtime raises classes of its own that share no base below Exception
        return False
    return bool(np.allclose(attended, 1.5))


def cache_types(manifest: Manifest, wanted: CacheType | None = None) -> dict[str, tuple[CacheType, ...]]:
    """What keys and values can be stored as here, each model's own type first.

    Args:
        manifest: of the bundle.
        wanted: the only type for the target; ``None`` leaves the choice.

    Returns:
        Types for ``"target"``, ``"draft"`` and ``"cpu_draft"``, as far as the bundle has them.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
        RequestError: the target cannot have the wanted type, or not here.
    """
    records = {"target": manifest.target, "draft": manifest.draft, "cpu_draft": manifest.cpu_draft}
    types = {
        name: tuple(dict.fromkeys(graph.kv for graph in record.graphs if graph.kv != "int8" or takes_int8_cache()))
        for name, record in records.items()
        if record is not None
    }
    if wanted is None:
        return types
    if wanted not in types["target"]:
        raise RequestError(
            f"kv is {wanted!r}, expected one of {', '.join(map(repr, types['target']))}, which this bundle for "
            f"{manifest.device} has and this ONNX Runtime takes, or None (no --kv)."
        )
    return {**types, "target": (wanted,)}


def require_int8_cache() -> None:
    """Raise ProviderError, with what to do, if the installed ONNX Runtime takes no int8 KV cache."""
    if not takes_int8_cache():
        raise ProviderError(
            f"ONNX Runtime {import_onnxruntime().__version__} takes no int8 KV cache. Upgrade it (1.27 does), or load "
            "with the KV cache in the model's own type."
        )
