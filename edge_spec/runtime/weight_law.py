"""What a model's weights take, from the manifest alone: as the CPU's kernels pack them, or as a GPU holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, exp

from edge_spec.manifest import Manifest, ModelRecord
from edge_spec.runtime.optimum_law import packed_bytes, uses_optimum

# Different tokens in a text of n: HEAPS * n ** EXPONENT, measured on chats, prose and code. Their rows of the embedding
# are read from the file, page by page.
_HEAPS, _EXPONENT = 6.5, 0.63
_PAGE = 1 << 12


@dataclass(frozen=True)
class Matrix:
    """So many matrices of a model are stored alike."""

    count: int
    inputs: int
    outputs: int
    storage: str


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights.

    Attributes:
        packed: what lies in memory once loaded: the matrices, and on a GPU everything else as well.
        touched: what generating reads of the mapped file besides.
        transient: the largest matrix, which lies in the host's memory twice while it is packed.
        read: what each call reads, however few rows it has: the matrices, which of a call with one row are most of its
            time.
    """

    packed: int = 0
    touched: int = 0
    transient: int = 0
    read: int = 0

    @property
    def resident(self) -> int:
        """Bytes while generating."""
        return self.packed + self.touched


def matrices_of(model: ModelRecord, inputs: int | None = None) -> Iterator[Matrix]:
    """The matrices of a model.

    Args:
        model: one whose graph is the exporter's own.
        inputs: elements that queries, keys and values are made of; by default those of the hidden state.
    """
    facts, recipe = model.architecture, model.recipe
    attended = facts.heads * facts.head_size
    layers = facts.layers
    inputs = facts.hidden_size if inputs is None else inputs
    yield Matrix(layers, inputs, attended + 2 * facts.kv_heads * facts.head_size, str(recipe["attention"]))
    yield Matrix(layers, attended, facts.hidden_size, str(recipe["attention"]))
    yield Matrix(layers, facts.hidden_size, 2 * facts.intermediate_size, str(recipe["mlp_up"]))
    yield Matrix(layers, facts.intermediate_size, facts.hidden_size, str(recipe["mlp_down"]))
    yield Matrix(1, facts.hidden_size, facts.logits_size, str(recipe["lm_head"]))


def weights_of(model: ModelRecord, manifest: Manifest, tokens: int) -> Weights:
    """What the weights of one of the bundle's models take for a text of so many tokens."""
    if uses_optimum(model):
        packed, largest = packed_bytes(model, manifest)
        return Weights(packed, _embedding(model, tokens, _block(model)), largest, packed)
    return matrix_weights(matrices_of(model), model, model, manifest.device_of(model) == "cuda", tokens)


def matrix_weights(
    matrices: Iterable[Matrix], model: ModelRecord, embedding: ModelRecord | None, on_gpu: bool, tokens: int
) -> Weights:
    """What a network takes for a text of so many tokens.

    Args:
        matrices: all that it has.
        model: knows its norms, biases and rotary tables.
        embedding: the model whose embedding it reads; ``None`` if it reads none.
        on_gpu: whether it lies on a GPU.
        tokens: of the text.
    """
    block = _block(model)
    facts = model.architecture
    read, largest = 0, 0
    for matrix in matrices:
        packed, original = _packed(matrix, block, on_gpu)
        read += matrix.count * packed
        largest = max(largest, original)
    vectors = facts.layers * (4 * facts.hidden_size + 2 * facts.intermediate_size) * 4
    rotary = sum(rope.size for rope in facts.ropes) * 4
    if on_gpu:  # whole, in half precision, and copied to the device from the mapped file
        tables = (facts.context_length + 1) * rotary
        whole = 0 if embedding is None else _whole_embedding(embedding, _block(embedding))
        return Weights(read + (vectors + tables) // 2 + whole, read=read)
    touched = 0 if embedding is None else _embedding(embedding, tokens, _block(embedding))
    return Weights(read, vectors + rotary * tokens + touched, largest, read)


def _block(model: ModelRecord) -> int:
    return int(model.recipe.get("block_size", 32))


def _packed(matrix: Matrix, block: int, on_gpu: bool) -> tuple[int, int]:
    """Bytes of a matrix in its kernel's own order, and of the original that lies beside it meanwhile."""
    count = matrix.inputs * matrix.outputs
    if matrix.storage == "w8a8":
        return count + 8 * matrix.outputs, count
    if matrix.storage == "int4":
        blocks = ceil(matrix.inputs / block)
        integers, scales = matrix.outputs * blocks * block // 2, 4 * matrix.outputs * blocks
        if on_gpu:
            return integers + scales // 2, integers
        # Scales and sums of each block are packed with the integers, and what those were made of stays mapped.
        zero_points = matrix.outputs * ceil(blocks / 2)
        return integers + 3 * scales + zero_points, integers
    if on_gpu and matrix.storage == "fp16":
        return 2 * count, 2 * count
    return 4 * count, 4 * count  # on CPU fp16 is widened


def _embedding(model: ModelRecord, tokens: int, block: int) -> int:
    """Bytes that a text of so many tokens reads of the mapped embedding."""
    facts = model.architecture
    storage = str(model.recipe["embedding"])
    parts = {
        "fp32": (4.0,),
        "fp16": (2.0,),
        "int8": (1.0, 4 / 32),
        "int4": (0.5, 4 / block, 0.5 / block),
    }[storage]
    rows = facts.readable_ids
    distinct = min(_HEAPS * tokens**_EXPONENT, rows)
    touched = 0.0
    for width in parts:
        row = facts.hidden_size * width
        pages = rows * row / _PAGE
        # A row that does not begin with a page reaches into one more.
        touched += pages * _PAGE * (1 - exp(-distinct * (row / _PAGE + 1) / pages))
    return int(touched)


def _whole_embedding(model: ModelRecord, block: int) -> int:
    """Bytes of the embedding on a GPU, where blocks have scales in half precision and no zero points."""
    facts = model.architecture
    item = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0 + 2 / 32, "int4": 0.5 + 2 / block}[str(model.recipe["embedding"])]
    return int(facts.readable_ids * facts.hidden_size * item)
