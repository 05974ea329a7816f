"""What the processor does to integer products, measured through the installed ONNX Runtime."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from edge_spec.onnx_runtime import import_onnxruntime

# One node, y = MatMulInteger(a: uint8 [2, 64], b: int8 [64, 16]): int32 [2, 16]. Kept as bytes, because the runtime
# does not depend on onnx. The tests build it again and compare.
INTEGER_PRODUCT_MODEL = bytes.fromhex(
    "08083a600a180a01610a0162120179220d4d61744d756c496e7465676572120570726f62655a130a0161120e0a0c0802"
    "12080a0208020a0208405a130a0162120e0a0c080312080a0208400a02081062130a0179120e0a0c080612080a020802"
    "0a02081042040a00100d"
)


def integer_product(a: npt.NDArray[np.uint8], b: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
    """Multiply as quantized layers do: uint8 activations by int8 weights, on the CPU provider.

    Args:
        a: uint8 [2, 64].
        b: int8 [64, 16].

    Returns:
        int32 [2, 16], whatever this processor's kernel makes of it.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(INTEGER_PRODUCT_MODEL, options, providers=["CPUExecutionProvider"])
    product: npt.NDArray[np.int32] = session.run(None, {"a": a, "b": b})[0]
    return product


@functools.cache
def integer_products_saturate() -> bool:
    """Tell whether products of uint8 activations and 8-bit weights overflow on this processor.

    x86 without VNNI adds neighbouring products in 16 bits with saturation (``vpmaddubsw``): 255 * 127 + 255 * 127 comes
    out as 32767. Weights of 7 bits stay exact there, since 2 * 255 * 64 = 32640 still fits.

    Raises:
        MissingDependencyError: ONNX Runtime is not installed.
    """
    a = np.full((2, 64), 255, np.uint8)
    b = np.tile(np.array([127, -128], np.int8), (64, 8))
    return not np.array_equal(integer_product(a, b), a.astype(np.int32) @ b.astype(np.int32))
