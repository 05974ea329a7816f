"""What a head learns from: its rollouts, their losses, and how well they are measured to draft."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tapped_texts import TOP, random_text

from edge_spec.distill.column_sample import ColumnSample, sample_columns
from edge_spec.distill.draft_loss import draft_losses
from edge_spec.distill.head import Head, HeadConfig
from edge_spec.distill.head_student import HeadStudent
from edge_spec.distill.held_out import measure_acceptance
from edge_spec.distill.rollout import roll_out
from edge_spec.distill.tapped_text import TappedText
from edge_spec.distill.text_batch import TextBatch, pack
from edge_spec.distill.train_settings import TrainSettings
from edge_spec.distill.trainer import batch_loss

CONFIG = HeadConfig(
    hidden_size=16,
    intermediate_size=24,
    heads=4,
    kv_heads=2,
    head_size=8,
    norm_epsilon=1e-5,
    rope_theta=100.0,
    vocabulary_size=40,
    draft_vocabulary_size=25,
    tap_layers=(1, 2),
    context_length=64,
)


def random_head(config: HeadConfig = CONFIG, seed: int = 0) -> Head:
    head = Head(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return head


def columns_of(ids: np.ndarray, vocabulary: int = 40) -> torch.Tensor:
    columns = torch.full((vocabulary,), -1)
    columns[torch.from_numpy(ids)] = torch.arange(len(ids))
    return columns


IDS = np.sort(np.random.default_rng(5).permutation(40)[:25]).astype(np.int64)
EMBEDDING = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
LM_HEAD = 0.3 * torch.randn(25, 16, generator=torch.Generator().manual_seed(2))


def whole_sample(batch: TextBatch) -> ColumnSample:
    return sample_columns(batch, len(IDS), TOP, len(IDS), np.random.default_rng(0))


class CachedHead:
    """Inference as it is told in the papers: one row at a time, with a cache."""

    def __init__(self, head: Head) -> None:
        self.weights = {name: value.double() for name, value in head.state_dict().items()}
        self.config = head.config
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, values: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.sqrt((values**2).mean() + self.config.norm_epsilon)
        return values / scale * self.weights[name]

    def rotated(self, vector: torch.Tensor, position: int) -> torch.Tensor:
        half = self.config.head_size // 2
        result = vector.clone()
        for index in range(half):
            angle = position * self.config.rope_theta ** (-index / half)
            first, second = vector[index], vector[index + half]
            result[index] = first * math.cos(angle) - second * math.sin(angle)
            result[index + half] = second * math.cos(angle) + first * math.sin(angle)
        return result

    def feed(self, feature: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, size, attention = self.weights, self.config.head_size, "midlayer.self_attn."
        position = len(self.keys)
        pair = torch.cat(
            [self.norm(embedded, "midlayer.input_layernorm.weight"), self.norm(feature, "midlayer.hidden_norm.weight")]
        )
        queries = (weights[attention + "q_proj.weight"] @ pair).view(-1, size)
        keys = (weights[attention + "k_proj.weight"] @ pair).view(-1, size)
        self.keys.append(torch.stack([self.rotated(key, position) for key in keys]))
        self.values.append((weights[attention + "v_proj.weight"] @ pair).view(-1, size))
        group = self.config.heads // self.config.kv_heads
        mixed = []
        for index, query in enumerate(queries):
            turned = self.rotated(query, position)
            scores = torch.stack([turned @ key[index // group] for key in self.keys]) / math.sqrt(size)
            shares = scores.softmax(0)
            mixed.append(sum(share * value[index // group] for share, value in zip(shares, self.values, strict=True)))
        stream = feature + weights[attention + "o_proj.weight"] @ torch.cat(mixed)
        normed = self.norm(stream, "midlayer.post_attention_layernorm.weight")
        gate, up = (weights[f"midlayer.mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        output = stream + weights["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return output, LM_HEAD.double() @ self.norm(output, "norm.weight")

    def rewind(self, length: int) -> None:
        del self.keys[length:], self.values[length:]


def drafted_one_by_one(head: Head, text: TappedText, steps: int) -> dict[tuple[int, int], torch.Tensor]:
    """The logits of each draft from each row of the answer, by (start, step)."""
    cached, found = CachedHead(head), {}
    taps, tokens = torch.from_numpy(text.taps).double(), text.token_ids.tolist()
    for row in range(len(tokens) - 2):
        feature = cached.weights["fc.weight"] @ taps[row]
        output, logits = cached.feed(feature, EMBEDDING[tokens[row + 1]].double())
        if row >= text.prompt_length - 1:
            found[row, 0] = logits
            for step in range(1, min(steps, len(tokens) - 2 - row)):
                output, logits = cached.feed(output, EMBEDDING[tokens[row + step + 1]].double())
                found[row, step] = logits
            cached.rewind(row + 1)
    return found


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=1, max_size=3),
    steps=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_all_rollouts_at_once_are_what_drafting_one_by_one_gives(
    lengths: list[tuple[int, int]], steps: int, seed: int
) -> None:
    texts = [random_text(seed + at, prompt + answer, prompt) for at, (prompt, answer) in enumerate(lengths)]
    head = random_head(seed=seed)
    expected = [drafted_one_by_one(head, text, steps) for text in texts]
    batch = pack(texts, columns_of(IDS), most=64)
    with torch.no_grad():
        outcomes = list(roll_out(head, EMBEDDING, batch, steps))
    seen = 0
    for step, outcome in enumerate(outcomes):
        logits = head.norm(outcome.outputs) @ LM_HEAD.T
        for row, given_logits in zip(outcome.rows.tolist(), logits, strict=True):
            text = max(at for at, span in enumerate(batch.spans) if span.start <= row)
            start = row - batch.spans[text].start - step - 1
            torch.testing.assert_close(given_logits.double(), expected[text][start, step], atol=1e-4, rtol=1e-4)
            seen += 1
    assert seen == sum(map(len, expected))


def test_only_what_an_answer_is_drafted_from_and_compared_with_moves_the_weights() -> None:
    run = TrainSettings(epochs=1, steps=3)
    text = random_text(1, 20, 8)

    def gradient(changed: TappedText) -> torch.Tensor:
        head = random_head()
        student = HeadStudent(head, EMBEDDING, LM_HEAD, IDS, run.steps)
        batch_loss(student, whole_sample(pack([changed], columns_of(IDS), 64)), run.steps, run.depth_weight).backward()
        return torch.cat([parameter.grad.reshape(-1) for parameter in head.parameters() if parameter.grad is not None])

    def changed(rows: slice, **fields: Any) -> TappedText:
        arrays = {name: getattr(text, name).copy() for name in ("token_ids", "taps", "top_ids", "top_log_probs")}
        for name, value in fields.items():
            arrays[name][rows] = value
        return TappedText(prompt_length=8, **arrays)

    unchanged = gradient(text)
    # Row 8 tells what follows the first token of the answer, which is the first that is ever drafted.
    assert torch.equal(gradient(changed(slice(0, 8), top_ids=3, top_log_probs=-0.5)), unchanged)
    assert torch.equal(gradient(changed(slice(19, 20), top_ids=3, top_log_probs=-0.5)), unchanged)
    assert torch.equal(gradient(changed(slice(18, 20), taps=3.0)), unchanged)
    assert not torch.equal(gradient(changed(slice(8, 9), top_ids=3, top_log_probs=-0.5)), unchanged)
    assert not torch.equal(gradient(changed(slice(18, 19), top_ids=3, top_log_probs=-0.5)), unchanged)
    assert not torch.equal(gradient(changed(slice(0, 1), taps=3.0)), unchanged)  # the prompt is read


def test_each_step_weighs_less_than_the_one_before() -> None:
    batch = pack([random_text(2, 20, 8)], columns_of(IDS), 64)
    head = random_head()
    of_steps = []
    for step, outcome in enumerate(roll_out(head, EMBEDDING, batch, 3)):
        probabilities = batch.probabilities[outcome.rows]
        cross_entropy, overlap = draft_losses(
            head.norm(outcome.outputs) @ LM_HEAD.T, batch.columns[outcome.rows], probabilities
        )
        of_steps.append(0.5**step * (cross_entropy + probabilities.sum(1) - overlap).sum() / 11)
    loss = batch_loss(HeadStudent(head, EMBEDDING, LM_HEAD, IDS, 3), whole_sample(batch), 3, 0.5)
    torch.testing.assert_close(loss, sum(of_steps))


def test_losses_are_cross_entropy_and_overlap_with_the_tokens_that_the_head_has() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    # Of the second row the likeliest token (0.7) is not in the draft vocabulary.
    columns, probabilities = torch.tensor([[2, 0], [0, 1]]), torch.tensor([[0.6, 0.3], [0.0, 0.2]])
    cross_entropy, overlap = draft_losses(logits, columns, probabilities)
    q = logits.softmax(1)
    expected = -0.6 * math.log(q[0, 2]) - 0.3 * math.log(q[0, 0])
    assert cross_entropy.tolist() == pytest.approx([expected, -0.2 * math.log(1 / 3)])
    assert overlap.tolist() == pytest.approx([0.6 + float(q[0, 0]), 0.2])


def test_gradients_of_the_losses_are_those_of_their_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    columns = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(5)])
    columns[:, 3] = columns[:, 0]  # what the draft vocabulary lacks stands in some column, too
    probabilities = torch.rand(5, 4, generator=generator, dtype=torch.float64) / 4
    probabilities[:, 3] = 0
    weights = torch.rand(2, 5, generator=generator, dtype=torch.float64)
    log_q = logits.log_softmax(1).gather(1, columns)
    plain = -(probabilities * log_q).sum(1), torch.minimum(probabilities, log_q.exp()).sum(1)
    gradients = []
    for losses in (plain, draft_losses(logits, columns, probabilities)):
        total = sum((weight * loss).sum() for weight, loss in zip(weights, losses, strict=True))
        gradients.append(torch.autograd.grad(total, logits)[0])
    torch.testing.assert_close(*gradients)


def test_acceptance_counts_drafts_up_to_the_first_wrong_token() -> None:
    # Four ids, the first three proposed. The head is made to propose the id of the token it has read last.
    config = HeadConfig(4, 1, 1, 1, 4, 1e-6, 100.0, 4, 3, (1,), 64)
    head = Head(config)
    embedding = torch.eye(4)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        for name in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"):
            head.get_submodule(name).weight.fill_(1.0)
        # Rows see none but themselves: the key of the same embedding is nearest by far.
        head.midlayer.self_attn.q_proj.weight[:, :4] = 100 * torch.eye(4)
        head.midlayer.self_attn.k_proj.weight[:, :4] = 100 * torch.eye(4)
        head.midlayer.self_attn.v_proj.weight[:, :4] = torch.eye(4)
        head.midlayer.self_attn.o_proj.weight.copy_(1000 * torch.eye(4))
    head.rotate.sines.zero_()
    head.rotate.cosines.fill_(1.0)
    tokens = np.array([3, 0, 0, 0, 1, 3], np.int32)
    likeliest = np.array([0, 0, 0, 1, 3, 0])
    text = TappedText(
        tokens,
        1,
        np.zeros((6, 4), np.float16),
        likeliest[:, None].astype(np.int32),
        np.full((6, 1), math.log(0.5), np.float16),
    )
    batch = pack([text], columns_of(np.arange(3), 4), 64)
    measured = measure_acceptance(HeadStudent(head, embedding, torch.eye(4)[:3], np.arange(3)), [batch])
    # Starts are rows 0 to 3. At step 0 they read 0, 0, 0, 1 and propose that; the target wants 0, 0, 1, 3.
    # At step 1 row 0 proposes 0 and is right, row 1 proposes 0 where 1 is wanted. At step 2 row 0 proposes 0, wanted 1.
    assert measured.by_position == pytest.approx((2 / 4, 1 / 2, 0.0, 0.0))
    assert measured.accepted_length == pytest.approx(0.5 + 0.25)
    assert measured.rollouts == 4
    # In the first row that can be right q is all but one for the id, and p is a half.
    assert measured.overlap == pytest.approx((0.5 + 0.5 + 0.0 + 0.0) / 4, abs=0.05)


def test_a_sampled_token_that_is_not_the_likeliest_ends_what_is_measured() -> None:
    text = random_text(3, 12, 3)
    batch = pack([text], columns_of(IDS), 64)
    likeliest = text.top_ids[:, 0]
    agrees = likeliest[text.prompt_length : -2] == text.token_ids[text.prompt_length + 1 : -1]
    assert not agrees.any()
    measured = measure_acceptance(HeadStudent(random_head(), EMBEDDING, LM_HEAD, IDS), [batch])
    assert measured.by_position[1:] == (0.0, 0.0, 0.0)


def test_a_half_precise_logit_costs_the_losses_no_more_than_its_own_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    rounded = torch.randn(5, 9, generator=generator).bfloat16()
    columns = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(5)])
    probabilities = torch.rand(5, 4, generator=generator) / 4
    exact, half = (logits.detach().requires_grad_() for logits in (rounded.float(), rounded))
    sums = [sum(loss.sum() for loss in draft_losses(logits, columns, probabilities)) for logits in (exact, half)]
    assert sums[0].detach() == sums[1].detach()
    gradients = [torch.autograd.grad(total, logits)[0] for total, logits in zip(sums, (exact, half), strict=True)]
    assert torch.equal(gradients[0].bfloat16(), gradients[1])
