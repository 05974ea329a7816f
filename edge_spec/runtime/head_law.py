"""What a head takes in memory, from the manifest alone: its matrices, its cache, and the hidden states kept for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_spec.manifest import HeadRecord, Manifest
from edge_spec.runtime.kv_cache import LEAST_SLOTS
from edge_spec.runtime.model import PREFILL_ROWS
from edge_spec.runtime.tap_rows import KEPT_TAP_ROWS, MOST_TAP_ROWS
from edge_spec.runtime.weight_law import Matrix, Weights, matrices_of, matrix_weights


def head_weights(head: HeadRecord, manifest: Manifest, tokens: int) -> Weights:
    """What the weights of a bundle's head take for a text of so many tokens.

    An lm_head that is the target's own counts once more: kernels pack weights for the session that they belong to. Of
    the embedding, the rows that are read.
    """
    embedding = None if head.kind == "medusa" else manifest.target
    return matrix_weights(_matrices(head), head.model, embedding, manifest.device_of(head.model) == "cuda", tokens)


def head_slots(head: HeadRecord, context: int) -> int:
    """Most slots of its cache: its own rows lie behind those of the whole context; none without a cache."""
    if head.kind == "medusa":
        return 0
    # A block's rows stand behind them twice (docs/heads-block.md).
    return context + (2 * head.block_size if head.kind in ("dflash", "dspark") else head.tokens)


def kept_taps_bytes(head: HeadRecord, manifest: Manifest, context: int, conversations: int) -> int:
    """Bytes of the hidden states that are kept of all texts: of one as many as there can be, of the others some."""
    texts = max(1, conversations * context // min(LEAST_SLOTS, context))
    rows = min(2 * MOST_TAP_ROWS, 2 * context + 64) + KEPT_TAP_ROWS * (texts - 1)
    return rows * _row_bytes(head.taps, manifest)


def tap_outputs_bytes(manifest: Manifest, with_head: bool) -> int:
    """Bytes of hidden states on their way.

    A call of the target computes those that its graph tells whether somebody wants them or not. They lie twice where a
    rotation is undone, and once more where a head reads them.
    """
    return (3 if with_head else 2) * PREFILL_ROWS * _row_bytes(manifest.target.graphs[0].taps, manifest)


def _row_bytes(taps: Sequence[int], manifest: Manifest) -> int:
    """Bytes of the hidden states of one token, as they are kept."""
    return 4 * len(taps) * manifest.target.architecture.hidden_size


def _matrices(head: HeadRecord) -> Iterator[Matrix]:
    facts, recipe = head.model.architecture, head.model.recipe
    hidden = facts.hidden_size
    if head.kind == "medusa":  # some residual blocks and an lm_head for each place of the proposal
        yield Matrix(head.tokens * facts.layers, hidden, hidden, str(recipe["mlp_up"]))
        yield Matrix(head.tokens, hidden, facts.logits_size, str(recipe["lm_head"]))
        return
    # EAGLE-3 joins the hidden states into one and reads that beside the embedding, DFlash and DSpark in its place; MTP
    # joins the two before its layer.
    read = 2 * hidden if head.kind == "mtp" else len(head.taps) * hidden
    yield Matrix(1, read, hidden, str(recipe["attention"]))
    yield from matrices_of(head.model, 2 * hidden if head.kind == "eagle3" else None)
