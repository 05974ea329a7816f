"""The oracle agrees with transformers where that has the same rule, and blocks of any shape agree with the oracle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge_spec.errors import LogitsError, NoTokenLeftError
from edge_spec.runtime.history import History, tree_paths
from edge_spec.runtime.logits_processors import LogitsPipeline, ProcessedRows
from edge_spec.runtime.noise import Noise, gumbel
from edge_spec.runtime.output import Output
from edge_spec.runtime.proposal import Proposal
from edge_spec.runtime.sampling import probabilities
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.verification import verify_coupled
from reference_decoder import DeadEndError, Reference, gumbel_noise, reference_decode

VOCAB, EOS = 11, 10


def hash_of_prefix(peakedness: float = 2.0, vocab: int = VOCAB) -> Callable[[Sequence[int]], np.ndarray]:
    """A model whose logits tell every history from every other."""

    def logits_of(history: Sequence[int]) -> np.ndarray:
        digest = hashlib.blake2b(bytes(history), digest_size=8).digest()
        generator = np.random.default_rng(int.from_bytes(digest, "little"))
        return generator.normal(0, peakedness, vocab).astype(np.float32)

    return logits_of


class Letters:
    joins_bytes = True

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("abcdefghijk"[token] for token in ids)

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def is_byte_fallback(self, token_id: int) -> bool:
        return False


def grammar(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """No token twice in a row, and after 3 only even ones."""
    logits[token_ids[-1]] = -np.inf
    if token_ids[-1] == 3:
        logits[1::2] = -np.inf
    return logits


def decode_in_blocks(
    logits_of: Callable[[Sequence[int]], np.ndarray],
    prompt: list[int],
    params: SamplingParams,
    processors: list[Any],
    propose: Callable[[list[int]], Proposal],
    context: int,
) -> Output:
    """The round, bare: the parts of the package that decide about tokens, and a model that is a function."""
    history = History(list(prompt))
    pipeline = LogitsPipeline(params, processors)
    output = Output(Letters(), params, [EOS], context - len(prompt))  # type: ignore[arg-type]
    while output.finish_reason is None:
        proposal = propose(history.tokens)
        parents = proposal.parents or tuple(range(-1, len(proposal.tokens) - 1))
        paths = tree_paths(proposal.tokens, parents)
        logits = np.stack([logits_of([*history.tokens, *path]) for path in paths])
        rows = ProcessedRows(pipeline, logits, history, paths)

        class Laws:
            def __getitem__(self, row: int, rows: ProcessedRows = rows) -> np.ndarray:
                return probabilities(rows[row][None], params)[0]

        noise: Any = NoNoise()
        if not params.greedy:
            assert params.seed is not None
            noise = Noise(params.seed).round(len(history.tokens))
        verdict = verify_coupled(Laws(), proposal, noise)
        _, emitted = output.push([*(proposal.tokens[node] for node in verdict.path), verdict.next_token])
        history.tokens.extend(emitted)
    return output


class NoNoise:
    """With a one-hot law, the coupled rule without noise is greedy decoding."""

    def gumbel(self, depth: int, vocab: int) -> np.ndarray:
        return np.zeros(vocab, np.float32)


def options_of(params: SamplingParams) -> dict[str, Any]:
    """What the reference takes."""
    names = {field.name for field in fields(params)} - {"logprobs", "deadline"}
    return {name: getattr(params, name) for name in names}


tokens = st.integers(0, EOS - 1)
requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 8, 500]),
    top_p=st.sampled_from([0.2, 0.9, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
    seed=st.integers(-(2**63), 2**63 - 1),
    max_new_tokens=st.integers(0, 25),
    stop=st.lists(st.text("abcdefgh", min_size=1, max_size=3), max_size=2).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.1, 2.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -2.0, 0.5, 3.0]), max_size=3),
    allowed_token_ids=st.one_of(st.none(), st.sets(tokens, min_size=5)),
    banned_token_ids=st.sets(tokens, max_size=2),
    stop_token_ids=st.sets(tokens, max_size=1),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(tokens, min_size=1, max_size=12), requests, st.booleans(), st.floats(0, 1), st.integers(0, 8), st.data()
)
def test_blocks_and_trees_of_any_drafts_give_the_reference_text(
    prompt: list[int], params: SamplingParams, with_grammar: bool, skill: float, width: int, data: st.DataObject
) -> None:
    logits_of = hash_of_prefix()
    processors = [grammar] if with_grammar else []
    decode = Letters().decode

    def reference_of(limit: int) -> Reference:
        return reference_decode(
            logits_of,
            prompt,
            **{**options_of(params), "max_new_tokens": limit},
            logits_processors=processors,
            eos_token_ids=[EOS],
            decode=lambda ids: decode([token for token in ids if token != EOS]),
            context=30,
        )

    dead_end = None
    try:
        reference = reference_of(params.max_new_tokens)
    except DeadEndError as error:  # the grammar wants an even token, and all of them are banned
        dead_end = error.position
        reference = reference_of(dead_end - len(prompt))
    assume(reference.margin > 1e-5)
    text = [*prompt, *reference.token_ids]
    luck = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def propose(history: list[int]) -> Proposal:
        count = int(luck.integers(0, width + 1))
        parents = [int(luck.integers(-1, node)) if luck.random() < 0.3 else node - 1 for node in range(count)]
        depth = [0] * count
        drafted: list[int] = []
        for node, parent in enumerate(parents):
            depth[node] = 0 if parent < 0 else depth[parent] + 1
            position = len(history) + depth[node]
            right = position < len(text) and luck.random() < skill
            drafted.append(text[position] if right else int(luck.integers(VOCAB)))
        return Proposal(tuple(drafted), parents=tuple(parents))

    if dead_end is not None:
        with pytest.raises(NoTokenLeftError, match=f"at position {dead_end}, no token is left"):
            decode_in_blocks(logits_of, prompt, params, processors, propose, 30)
        return
    output = decode_in_blocks(logits_of, prompt, params, processors, propose, 30)
    assert output.token_ids == reference.token_ids
    assert output.finish_reason == reference.finish_reason


@pytest.mark.parametrize("drafts", [[], [2], [2, 1], [0, 2, 1]])
def test_an_error_behind_a_draft_token_shows_only_if_the_text_goes_there(drafts: list[int]) -> None:
    """The model breaks down after token 2, and the grammar has no answer after token 1."""

    def model(history: Sequence[int]) -> np.ndarray:
        return np.full(3, np.nan, np.float32) if history[-1] == 2 else np.array([3, 1, 2], np.float32)

    def no_answer(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return np.full_like(logits, -np.inf) if token_ids[-1] == 1 else logits

    def run(**options: Any) -> list[int]:
        params = SamplingParams(max_new_tokens=4, **options)
        return decode_in_blocks(model, [0], params, [no_answer], lambda _: Proposal(tuple(drafts)), 20).token_ids

    assert run() == [0, 0, 0, 0]
    with pytest.raises(LogitsError, match="at position 2, the largest logit is nan"):
        run(banned_token_ids=[0])
    with pytest.raises(NoTokenLeftError, match="at position 2, no token is left"):
        run(banned_token_ids=[0, 2])


def test_noise_is_that_of_the_documented_layout() -> None:
    for seed, position in [(0, 0), (-1, 7), (2**63 - 1, 10**6), (-(2**63), 3)]:
        np.testing.assert_allclose(gumbel(seed, position, 3001), gumbel_noise(seed, position, 3001), rtol=0, atol=2e-6)


def test_its_law_is_the_one_it_samples() -> None:
    """Frequencies over seeds against the softmax of the logits."""
    logits = np.array([1.0, 0.0, -1.0, 2.0], np.float32)
    count = 20_000
    drawn = [
        reference_decode(lambda history: logits, [0], temperature=1.0, seed=seed, max_new_tokens=1).token_ids[0]
        for seed in range(count)
    ]
    law = np.exp(logits) / np.exp(logits).sum()
    observed = np.bincount(drawn, minlength=4) / count
    assert np.abs(observed - law).max() < 4 * 0.5 / np.sqrt(count)


def test_greedy_with_penalties_is_what_transformers_generates() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval()

    def logits_of(history: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([history])).logits[0, -1].float().numpy()

    for penalty in (1.0, 1.3):
        theirs = model.generate(
            torch.tensor([[3, 14, 15]]),
            do_sample=False,
            max_new_tokens=30,
            repetition_penalty=penalty,
            eos_token_id=[7, 9],
            pad_token_id=0,
        )[0, 3:].tolist()
        ours = reference_decode(
            logits_of, [3, 14, 15], max_new_tokens=30, repetition_penalty=penalty, eos_token_ids=[7, 9]
        )
        assert ours.token_ids == theirs
