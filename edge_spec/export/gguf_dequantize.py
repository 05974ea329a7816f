"""Block-quantized GGUF rows to float32."""

from __future__ import annotations

from typing import cast

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

SUPPORTED_TYPES = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)

# gguf decodes 16 rows at a time. Rows of this many elements keep its temporaries inside the L2 cache while the
# cost of the numpy calls stays small; the model's own rows are too short, three times slower for Q4_K.
_ROW_ELEMENTS = 8192


def dequantize(rows: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Decode rows of blocks.

    Args:
        rows: uint8 [rows, row_bytes], contiguous.
        kind: one of ``SUPPORTED_TYPES``.

    Returns:
        float32 [rows, columns].
    """
    if kind is GGMLQuantizationType.F32:
        return rows.view(np.float32)
    if kind is GGMLQuantizationType.F16:
        return rows.view(np.float16).astype(np.float32)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    # A block knows nothing of its row, so rows may be cut anywhere between blocks.
    regrouped = _ROW_ELEMENTS // block * block_bytes
    whole = rows.size // regrouped * regrouped
    flat = rows.reshape(-1)
    out = np.empty(rows.size // block_bytes * block, dtype=np.float32)
    done = whole // block_bytes * block
    if whole:
        out[:done] = _decode(flat[:whole].reshape(-1, regrouped), kind)
    if whole < rows.size:
        out[done:] = _decode(flat[whole:].reshape(1, -1), kind)
    return out.reshape(len(rows), -1)


def _decode(rows: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    return cast("npt.NDArray[np.float32]", gguf.dequantize(rows, kind)).reshape(-1)
