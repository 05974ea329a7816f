"""Texts that a target writes for its draft to learn from, and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.bundle import open_bundle, read_manifest
from edge_spec.distill.batch_writer import BatchWriter, Prompt, loops
from edge_spec.distill.chat_frame import chat_frame
from edge_spec.distill.prompt_set import SELF_ASKED, PromptSet
from edge_spec.distill.prompt_source import ANSWERED_BEFORE, Asker, ListedPrompts, listed
from edge_spec.distill.tap_files import TapFiles, TapHeader
from edge_spec.distill.tapped_text import TappedText
from edge_spec.distill.target_batch import TargetBatch
from edge_spec.distill.write_texts import default_taps, write_texts
from edge_spec.errors import RequestError
from edge_spec.export import add_head
from edge_spec.prompt_file import read_questions
from edge_spec.runtime.prompt import PromptEncoder
from edge_spec.runtime.tokenizer import TextTokenizer
from head_checkpoints import eagle3_tensors, llama_config, save_head
from tiny_models import CHAT_TEMPLATE, EOS, IM_END, SIZES, VARIANTS, random_model

_LAYERS = {"num_hidden_layers": 4}
_HEADER = TapHeader("ab" * 32, (1, 3), 8, 4, 7, "some", 20)
_PROMPTS = ListedPrompts([f"text {number} of them" for number in range(80)], "eighty")


def _ids(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, count)]


def _text(tokens: int, seed: int = 0) -> TappedText:
    dice = np.random.default_rng(seed)
    return TappedText(
        dice.integers(0, 99, tokens).astype(np.int32),
        tokens // 2,
        dice.normal(size=(tokens, 16)).astype(np.float16),
        dice.integers(0, 99, (tokens, 4)).astype(np.int32),
        dice.normal(size=(tokens, 4)).astype(np.float16),
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("variant", ["llama", "mistral", "gemma3", "qwen3"])
def test_a_text_in_a_batch_comes_out_as_it_does_alone(tiny_bundle: Callable[..., Path], variant: str) -> None:
    bundle = open_bundle(tiny_bundle(**VARIANTS[variant]))
    texts = [_ids(length, length) for length in (3, 70, 41)]
    continuations = np.array([_ids(9, 100 + slot) for slot in range(3)])
    together = TargetBatch(bundle, (1, 2), 3, 128)
    for slot, text in enumerate(texts):
        together.read(slot, text)
    rows = [together.advance(continuations[:, step]) for step in range(9)]
    for slot, text in enumerate(texts):
        alone = TargetBatch(bundle, (1, 2), 1, 128).read(0, [*text, *map(int, continuations[slot])], wanted=9)
        for step in range(9):
            assert np.allclose(rows[step].top_logits[slot], alone.top_logits[step], atol=2e-3)
            assert np.array_equal(rows[step].top_ids[slot, :1], alone.top_ids[step, :1])
            assert np.allclose(rows[step].taps[slot], alone.taps[len(text) + step], atol=0.02, rtol=0.01)


@pytest.mark.parametrize(("recipe", "off"), [("fp32", 0.003), ("w8a8", 0.1)])
def test_taps_are_the_hidden_states_of_the_checkpoint(
    tiny_bundle: Callable[..., Path], recipe: str, off: float
) -> None:
    bundle = open_bundle(tiny_bundle(recipe=recipe, **_LAYERS))
    ids = _ids(75)
    rows = TargetBatch(bundle, (1, 3, 4), 2, 128).read(1, ids, wanted=75)
    model = random_model(**_LAYERS)
    streams: list[torch.Tensor] = []
    # The last of transformers' hidden states is behind the final norm, so the layers' own outputs are caught.
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, given, output: streams.append(_first(output)))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    size = SIZES["hidden_size"]
    for place, tap in enumerate((1, 3, 4)):
        expected = streams[tap - 1][0].numpy()
        ours = rows.taps[:, place * size : (place + 1) * size].astype(np.float32)
        assert np.linalg.norm(ours - expected) < off * np.linalg.norm(expected)
    likeliest = rows.top_ids[:, 0] == logits[:, : bundle.manifest.vocab_size].argmax(1)
    assert likeliest.mean() > 1 - 2 * off


def test_log_probs_are_those_of_the_whole_vocabulary(tiny_bundle: Callable[..., Path]) -> None:
    bundle = open_bundle(tiny_bundle(**_LAYERS))
    ids = _ids(20)
    rows = TargetBatch(bundle, (2,), 1, 32).read(0, ids, wanted=20)
    with torch.no_grad():
        logits = random_model(**_LAYERS)(torch.tensor([ids])).logits[0, :, : bundle.manifest.vocab_size]
    expected = torch.log_softmax(logits, 1).numpy()
    assert np.allclose(np.take_along_axis(expected, rows.top_ids, 1), rows.top_log_probs, atol=0.02)


def test_greedy_texts_are_greedy_and_the_others_come_from_the_dice(tiny_bundle: Callable[..., Path]) -> None:
    bundle = open_bundle(tiny_bundle(eos=IM_END))

    def written(seed: int, slots: int) -> dict[int, TappedText]:
        prompts = iter([Prompt(number, _ids(5, number)) for number in range(12)])
        writer = BatchWriter(TargetBatch(bundle, (1,), slots, 64), [IM_END], 24, seed)
        return dict(writer.write(lambda: next(prompts, None)))

    first, again, other = written(3, 4), written(3, 4), written(4, 4)
    assert sorted(first) == list(range(12))
    shares = []
    for number, text in first.items():
        assert list(text.token_ids[:5]) == _ids(5, number)
        assert 1 <= text.answer_length <= 24
        assert not np.any(text.top_ids[: text.prompt_length - 1])
        assert np.array_equal(text.token_ids, again[number].token_ids)
        assert np.array_equal(text.taps, again[number].taps)
        answered = slice(text.prompt_length - 1, -1)
        shares.append(np.mean(text.top_ids[answered, 0] == text.token_ids[text.prompt_length :]))
    assert 2 <= sum(share == 1 for share in shares) <= 10
    assert any(not np.array_equal(first[number].token_ids, other[number].token_ids) for number in first)


def test_taps_of_a_written_text_are_those_of_reading_it(tiny_bundle: Callable[..., Path]) -> None:
    bundle = open_bundle(tiny_bundle(recipe="w8a8", **_LAYERS))
    prompts = iter([Prompt(number, _ids(4 + number, number)) for number in range(5)])
    writer = BatchWriter(TargetBatch(bundle, (1, 4), 3, 64), [EOS], 20, 0)
    reader = TargetBatch(bundle, (1, 4), 1, 64)
    for _, text in writer.write(lambda: next(prompts, None)):
        read = reader.read(0, [int(token) for token in text.token_ids], wanted=len(text.token_ids))
        assert np.allclose(text.taps, read.taps, atol=0.1, rtol=0.05)
        begin = text.prompt_length - 1
        assert np.allclose(text.top_log_probs[begin:], read.top_log_probs[begin:], atol=0.1)


@given(period=st.integers(1, 20), seed=st.integers(0, 9))
def test_a_text_that_repeats_itself_is_ended(period: int, seed: int) -> None:
    tail = [int(token) for token in np.random.default_rng(seed).permutation(period)]
    turning = [500, 501, 502, *tail * 30][: 3 + max(4 * period, 24)]
    assert loops(turning, len(turning))
    assert not loops([*turning[:-1], 600], len(turning))
    assert not loops(turning, max(4 * period, 24) - 1)  # the beginning belongs to the prompt
    assert not loops(list(range(100)), 100)


@settings(max_examples=20, deadline=None)
@given(counts=st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=4), min_size=1, max_size=4))
def test_texts_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, counts: Sequence[Sequence[int]]
) -> None:
    folder = tmp_path_factory.mktemp("taps")
    files = TapFiles.begin(folder, _HEADER)
    texts: list[TappedText] = []
    for number, lengths in enumerate(counts):
        part = [_text(length, 10 * number + place) for place, length in enumerate(lengths)]
        assert files.append(part)
        texts += part
    for opened in (files, TapFiles(folder)):
        assert len(opened) == len(texts)
        assert opened.total_tokens == sum(len(text.token_ids) for text in texts)
        assert opened.answer_tokens == sum(text.answer_length for text in texts)
        assert opened.stored_bytes == sum(path.stat().st_size for path in folder.glob("texts-*"))
        for index, text in enumerate(texts):
            read = opened.read(index)
            assert opened.lengths(index) == (len(text.token_ids), text.prompt_length)
            assert read.prompt_length == text.prompt_length
            for ours, theirs in zip(read.arrays(), text.arrays(), strict=True):
                assert ours.dtype == theirs.dtype
                assert np.array_equal(ours, theirs)


def test_an_interrupted_run_goes_on_to_the_same_files(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    bundle = tiny_bundle(recipe="w8a8")
    settings: dict[str, Any] = {"taps": (1, 2), "batch": 5, "max_new_tokens": 12, "max_prompt_tokens": 40, "seed": 2}

    class Killed(Exception):
        pass

    def killed_later(stage: str, done: int, total: int) -> None:
        if done >= 45:
            raise Killed

    whole = write_texts(bundle, _PROMPTS, tmp_path / "whole", **settings)
    assert len(whole.files) == 80
    with pytest.raises(Killed):
        write_texts(bundle, _PROMPTS, tmp_path / "parts", progress=killed_later, **settings)
    done = _files(tmp_path / "parts")
    assert "texts-00000.bin" in done
    assert "texts-00002.bin" not in done
    (tmp_path / "parts" / ".texts-00001.bin.partial").write_bytes(b"half")  # as a killed writer leaves it
    write_texts(bundle, _PROMPTS, tmp_path / "parts", **settings)
    assert _files(tmp_path / "parts") == _files(tmp_path / "whole")


def test_texts_are_gone_on_with_once_the_bundle_has_a_head(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    """Its target then tells hidden states of its own accord, those that are wanted here or others."""
    bundle = tiny_bundle(recipe="w8a8", **_LAYERS)
    vocabulary = read_manifest(bundle).target.architecture.logits_size
    config = llama_config(SIZES["hidden_size"], 20, vocabulary, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    head = save_head(tmp_path / "head", config, eagle3_tensors(SIZES["hidden_size"], list(range(20)), vocabulary))
    settings: dict[str, Any] = {"taps": (1, 3, 4), "batch": 5, "max_new_tokens": 12, "max_prompt_tokens": 40}
    whole = write_texts(bundle, _PROMPTS, tmp_path / "whole", **settings)
    write_texts(bundle, _PROMPTS, tmp_path / "parts", texts=32, **settings)
    with_head = add_head(bundle, head, output=tmp_path / "with head", recipe="fp32").path
    assert len(write_texts(with_head, _PROMPTS, tmp_path / "parts", **settings).files) == len(whole.files)
    assert _files(tmp_path / "parts") == _files(tmp_path / "whole")


def test_there_is_never_more_than_the_limit(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    limit = 600_000
    written = write_texts(
        tiny_bundle(), _PROMPTS, tmp_path, taps=(1,), batch=8, max_new_tokens=20, limit_bytes=limit, seed=0
    )
    assert written.full
    assert 0 < len(written.files) < 80
    assert sum(path.stat().st_size for path in tmp_path.glob("texts-*")) == written.files.stored_bytes <= limit


def test_enough_tokens_end_a_run(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    written = write_texts(
        tiny_bundle(),
        _PROMPTS,
        tmp_path,
        batch=4,
        max_new_tokens=12,
        tokens=100,
        progress=lambda stage, done, total: told.append((done, total)),
    )
    assert len(written.files) == 32
    assert written.files.answer_tokens >= 100
    assert told[-1] == (100, 100)
    assert written.files.header.taps == default_taps(SIZES["num_hidden_layers"])


def test_texts_without_taps_are_those_with_them(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"texts": 4, "batch": 3, "max_new_tokens": 8, "max_prompt_tokens": 90, "seed": 1}
    tapped, bare = (
        write_texts(tiny_bundle(recipe="w8a8"), _PROMPTS, tmp_path / name, taps=taps, **settings).files
        for name, taps in (("tapped", (1, 2)), ("bare", ()))
    )
    for index in range(4):
        ours, theirs = bare.read(index), tapped.read(index)
        assert ours.taps.shape == (len(ours.token_ids), 0)
        for one, other in zip(ours.arrays()[:3], theirs.arrays()[:3], strict=True):
            assert np.array_equal(one, other)


def test_a_folder_is_only_continued_with_what_it_was_begun_with(
    tiny_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    write_texts(tiny_bundle(), _PROMPTS, tmp_path, texts=2, batch=2, max_new_tokens=4)
    with pytest.raises(RequestError, match="seed 0, not 1"):
        write_texts(tiny_bundle(), _PROMPTS, tmp_path, texts=2, batch=2, max_new_tokens=4, seed=1)
    with pytest.raises(RequestError, match="prompts 'eighty'"):
        write_texts(tiny_bundle(), ListedPrompts(["a"], "one"), tmp_path, texts=2, batch=2, max_new_tokens=4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"taps": (3,)}, "layers from 1 to 2"),
        ({"batch": 0}, "batch is 0"),
        ({"tokens": 0}, "tokens is 0"),
        ({"max_new_tokens": 256, "max_prompt_tokens": 1}, "no room for a prompt"),
    ],
)
def test_settings_out_of_range_are_refused(
    tiny_bundle: Callable[..., Path], tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        write_texts(tiny_bundle(), _PROMPTS, tmp_path, **{"max_new_tokens": 8, **wrong})


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no tapped texts"):
        TapFiles(tmp_path)
    files = TapFiles.begin(tmp_path, _HEADER)
    files.append([_text(9)])
    path = tmp_path / "texts-00000.bin"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(RequestError, match="is damaged"):
        TapFiles(tmp_path)
    path.rename(tmp_path / "texts-00001.bin")
    with pytest.raises(RequestError, match="but no texts-00000.bin"):
        TapFiles(tmp_path)


def test_shipped_prompts_are_many_and_different_and_those_of_their_seed() -> None:
    prompts, again, other = PromptSet(5), PromptSet(5), PromptSet(6)

    def asked(source: PromptSet, number: int) -> str:
        opening = source.opening(number, lambda earlier: f"Answer {earlier} says this and that. " * 20)
        assert (opening is Asker.TARGET) == (source.kind(number) == SELF_ASKED)
        return f"the target asks {number}" if opening is Asker.TARGET else json.dumps(opening)

    texts = [asked(prompts, number) for number in range(6000)]
    assert len(set(texts)) == 6000
    assert [asked(again, number) for number in (700, 3, 5999)] == [texts[700], texts[3], texts[5999]]
    composed = {text for text in texts if not text.startswith("the target")}
    assert len(composed & {asked(other, number) for number in range(6000)}) < 1000
    kinds = [prompts.kind(number) for number in range(6000)]
    assert len(set(kinds)) == 14
    assert all(kinds.count(kind) > 30 for kind in set(kinds))
    assert 2800 < kinds.count(SELF_ASKED) < 3200


def test_prompts_build_only_on_answers_that_are_there() -> None:
    prompts = PromptSet(1)
    asked: list[int] = []

    for number in range(2000):

        def answer_to(earlier: int, number: int = number) -> str:
            assert 0 <= earlier <= number - ANSWERED_BEFORE
            asked.append(earlier)
            return f"This is what was answered to {earlier}. " * 60

        messages = prompts.opening(number, answer_to)
        if messages is Asker.TARGET:
            continue
        assert [message["role"] for message in messages] in (["user"], ["user", "assistant", "user"])  # type: ignore[index]
        assert all("{" not in message["content"] for message in messages if prompts.kind(number) != "code")  # type: ignore[index]
    assert len(asked) > 100


def test_a_target_with_a_template_answers_shipped_prompts(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    bundle = tiny_bundle(chat_template=CHAT_TEMPLATE, max_position_embeddings=1024)
    written = write_texts(bundle, PromptSet(0), tmp_path, texts=3, batch=2, max_new_tokens=6)
    assert len(written.files) == 3
    assert all(written.files.lengths(index)[1] > 20 for index in range(3))


class _SelfAsked:
    """Prompts that the target asks."""

    name = "self-asked"

    def __len__(self) -> int:
        return 9

    def opening(self, number: int, answer_to: Callable[[int], str]) -> Asker:
        return Asker.TARGET


def test_a_target_asks_itself_and_answers(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    bundle = open_bundle(tiny_bundle(chat_template=CHAT_TEMPLATE, eos=IM_END, max_position_embeddings=1024))
    tokenizer = TextTokenizer(bundle.tokenizer_path)
    encode = PromptEncoder(tokenizer, bundle.manifest, bundle.chat_template(), 1024).encode
    frame = chat_frame(encode)
    message = [{"role": "user", "content": "Tell me more."}]
    assert [*frame.before, *tokenizer.encode("Tell me more."), *frame.behind] == encode(message)

    def write(folder: str, batch: int) -> TapFiles:
        return write_texts(bundle, _SelfAsked(), tmp_path / folder, batch=batch, max_new_tokens=9).files

    files, again = write("first", 4), write("again", 4)
    questions = set()
    for index in range(9):
        text = files.read(index)
        prompt = text.token_ids[: text.prompt_length].tolist()
        assert prompt[: len(frame.before)] == list(frame.before)
        assert prompt[-len(frame.behind) :] == list(frame.behind)
        question = prompt[len(frame.before) : -len(frame.behind)]
        assert len(question) <= 256 and IM_END not in question
        questions.add(tuple(question))
        assert 1 <= text.answer_length <= 9
        assert not text.top_ids[: text.prompt_length - 1].any() and text.top_log_probs[text.prompt_length - 1].any()
        assert np.array_equal(text.token_ids, again.read(index).token_ids)
        read = TargetBatch(bundle, files.header.taps, 1, 1024).read(0, text.token_ids.tolist())
        assert np.allclose(text.taps, read.taps, atol=0.02, rtol=0.01)
    assert len(questions) == 9


def test_a_template_that_ends_with_the_message_is_no_frame() -> None:
    with pytest.raises(RequestError, match="nothing behind a message"):
        chat_frame(lambda messages: [1, 2, *messages[0]["content"].encode()])


def test_a_context_without_room_for_a_question_is_told(tiny_bundle: Callable[..., Path], tmp_path: Path) -> None:
    bundle = tiny_bundle(chat_template=CHAT_TEMPLATE)
    with pytest.raises(RequestError, match="which the chat template takes alone"):
        write_texts(bundle, _SelfAsked(), tmp_path, max_new_tokens=8, max_prompt_tokens=3)


def test_recorded_prompts_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Once"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n{"token_ids": [1, 2]}\n')
    prompts = listed(read_questions(path, recorded=True), path)
    openings = [prompts.opening(number, str) for number in range(len(prompts))]
    assert openings == ["Once", ({"role": "user", "content": "Hi"},), (1, 2)]
    with pytest.raises(RequestError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl", recorded=True)


def _first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor
