"""Which tokens a draft is likely to be right with: a ranking of its ids, without a corpus."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_spec.export.checkpoint import Checkpoint
from edge_spec.export.decoder import read_final_norm, read_layer
from edge_spec.export.progress import Progress
from edge_spec.export.reference import Float32Reference

# Rows of lm_head read at a time.
_ROWS_AT_ONCE = 4096
# The model is asked at this temperature: what it finds second best here is the best elsewhere.
_TEMPERATURE = 2.0
# Of the first so many ranks hardly any is told from another.
_EVEN_RANKS = 100


def expected_shares(
    checkpoint: Checkpoint, token_ids: npt.NDArray[np.int64], progress: Progress
) -> npt.NDArray[np.float64]:
    """How often a model expects each token on average, over the places of a text: a smoothed count.

    Args:
        checkpoint: the model.
        token_ids: int64 [tokens], some hundred tokens of text.
        progress: told about every layer.

    Returns:
        float64 [rows of the embedding].
    """
    facts = checkpoint.architecture
    embedded = np.concatenate(
        [checkpoint.rows("embed_tokens.weight", token, token + 1) for token in token_ids.tolist()]
    )
    reference = Float32Reference(facts, embedded)
    for index in range(facts.layers):
        progress("rank tokens", index, facts.layers + 1)
        reference.run_layer(read_layer(checkpoint, index))
    hidden = reference.final_hidden(read_final_norm(checkpoint)) / np.float32(_TEMPERATURE)
    name = "embed_tokens.weight" if facts.tied_embeddings else "lm_head.weight"
    logits = np.empty((facts.logits_size, len(hidden)), np.float32)
    for start in range(0, facts.logits_size, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, facts.logits_size)
        np.matmul(checkpoint.rows(name, start, stop), hidden.T, out=logits[start:stop])
    logits -= logits.max(axis=0)
    np.exp(logits, out=logits)
    shares: npt.NDArray[np.float64] = (logits / logits.sum(axis=0)).mean(axis=1, dtype=np.float64)
    progress("rank tokens", facts.layers + 1, facts.layers + 1)
    return shares


def ranked(shares: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """All ids, the likeliest first.

    Those that occur in a text stand first, by how often. The others stand by two ranks together: that of the model's
    expectation, and the id itself, since a tokenizer is trained by giving ids to what is frequent first.

    Args:
        shares: float64 [ids], as of :func:`expected_shares`.
        counts: float64 [ids], how often they occur.
    """
    rank = np.empty(len(shares))
    rank[np.argsort(-shares, kind="stable")] = np.arange(len(shares))
    both = np.log(rank + _EVEN_RANKS) + np.log(np.arange(len(shares)) + _EVEN_RANKS)
    return np.lexsort((both, -counts))
