"""A head drafting from every row of a text at once, as it would at inference (training-time test, EAGLE-3 section 3.1).

From each row s of an answer starts a rollout. Its step 0 reads the target's feature of token s; step j reads the head's
own output of step j - 1 and the text's next token, stands at position s + j, and sees the rows up to s as the target
fed them and behind those its own. All rollouts do a step together: their own rows differ, so of those each score is a
sum of products of its own, while the rows that the target fed are one matrix for all.

Tensors are float32, or under autocast what that makes of them, unless another type is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from edge_spec.distill.head import Head
from edge_spec.distill.text_batch import TextBatch


@dataclass(frozen=True)
class Step:
    """One step of all rollouts that come as far.

    Attributes:
        rows: int64 [rollouts], the rows of the batch that tell what is right: they hold what follows the token that the
            step has read last.
        outputs: [rollouts, hidden], the head's.
    """

    rows: Tensor
    outputs: Tensor


def roll_out(head: Head, embedding: Tensor, batch: TextBatch, steps: int) -> Iterator[Step]:
    """Give one step after the other.

    Args:
        head: the head.
        embedding: [vocabulary, hidden], the target's.
        batch: the texts.
        steps: how many steps at most; there are fewer if all texts are shorter.
    """
    fed = torch.cat([torch.arange(span.start, span.start + span.rows) for span in batch.spans])
    fed = fed.to(batch.token_ids.device)
    fused = head.fc(batch.taps[fed])
    pairs = head.pairs(fused, _embedded(embedding, batch.token_ids[fed + 1]))
    keys, values = head.keys_and_values(pairs, batch.positions[fed])
    keys_of_texts, values_of_texts = (torch.split(part, [s.rows for s in batch.spans]) for part in (keys, values))

    # Each step is fed with some of the rows that were put out before it.
    kept = _kept([span.rows for span in batch.spans], [(span.first, span.rows) for span in batch.spans])
    outputs = fused
    own: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        counts = [span.rollouts(step) for span in batch.spans]
        if not sum(counts):
            return
        kept, starts = kept.to(fed.device), batch.starts(step)
        features = outputs[kept]
        pairs = head.pairs(features, _embedded(embedding, batch.token_ids[starts + step + 1]))
        if step:
            own = [(key[kept], value[kept]) for key, value in own]
            own.append(head.keys_and_values(pairs, batch.positions[starts + step]))
        queries = head.queries(pairs, batch.positions[starts + step])
        # Split, not sliced: gradients of slices are as large as what they were cut from.
        of_texts = [torch.split(part, counts) for part in (queries, *(part for pair in own for part in pair))]
        attended = []
        for span, count, fed_keys, fed_values, mine, *others in zip(
            batch.spans, counts, keys_of_texts, values_of_texts, *of_texts, strict=True
        ):
            if count:
                seen = span.first + count
                own_of_text = list(zip(others[::2], others[1::2], strict=True))
                attended.append(attend(mine, fed_keys[:seen], fed_values[:seen], own_of_text))
        outputs = head.outputs(features, torch.cat(attended))
        yield Step(starts + step + 1, outputs)
        kept = _kept(counts, [(0, span.rollouts(step + 1)) for span in batch.spans])


def attend(queries: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the rollouts of one text.

    Args:
        queries: [rollouts, heads, size].
        keys: [rows, kv_heads, size], as the target fed them; the last rollout sees all of them, the one before
            it all but the last, and so on.
        values: as the keys.
        own: keys and values of the rollouts' own rows, each [rollouts, kv_heads, size].

    Returns:
        [rollouts, heads * size].
    """
    rollouts, heads, size = queries.shape
    rows, kv_heads, _ = keys.shape
    # [kv_heads, rollouts, heads of each, size]
    grouped = (queries / math.sqrt(size)).view(rollouts, kv_heads, -1, size).transpose(0, 1)
    flat = grouped.reshape(kv_heads, -1, size)
    scores = (flat @ keys.permute(1, 2, 0)).view(kv_heads, rollouts, -1, rows)
    hidden = torch.ones(rollouts, rows, dtype=torch.bool, device=keys.device).triu_(rows - rollouts + 1)
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    own_scores = [(grouped * key.transpose(0, 1)[:, :, None]).sum(-1, keepdim=True) for key, _ in own]
    weights = functional.softmax(torch.cat((scores, *own_scores), dim=-1), dim=-1)
    fed = weights[..., :rows].reshape(kv_heads, -1, rows) @ values.transpose(0, 1)
    mixed = fed.view(kv_heads, rollouts, -1, size)
    for index, (_, value) in enumerate(own):
        mixed = mixed + weights[..., rows + index, None] * value.transpose(0, 1)[:, :, None]
    return mixed.transpose(0, 1).reshape(rollouts, heads * size)


def _embedded(embedding: Tensor, token_ids: Tensor) -> Tensor:
    return embedding[token_ids].float()


def _offsets(counts: Sequence[int]) -> list[int]:
    """Where each part starts, of parts that lie one behind the other."""
    return [sum(counts[:index]) for index in range(len(counts))]


def _kept(counts: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The indices, over all parts, of a range of each part."""
    parts = zip(_offsets(counts), ranges, strict=True)
    return torch.cat([torch.arange(offset + start, offset + max(start, stop)) for offset, (start, stop) in parts])
