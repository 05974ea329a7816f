"""Has a bundle's target write texts into a folder, until there are enough of them; a run that was ended goes on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edge_spec.bundle import Bundle, open_bundle
from edge_spec.distill.batch_writer import BatchWriter, OwnQuestion, Prompt
from edge_spec.distill.chat_frame import ChatFrame, chat_frame
from edge_spec.distill.prompt_source import ANSWERED_BEFORE, Asker, ListedPrompts, PromptSource
from edge_spec.distill.tap_files import TapFiles, TapHeader
from edge_spec.distill.tapped_text import TappedText
from edge_spec.distill.target_batch import TargetBatch
from edge_spec.errors import RequestError
from edge_spec.export.graph_taps import eagle3_taps
from edge_spec.export.progress import Progress, silent
from edge_spec.manifest import CHAT_TEMPLATE, TOKENIZER, Manifest
from edge_spec.runtime.prompt import PromptEncoder
from edge_spec.runtime.tokenizer import TextTokenizer

DEFAULT_BATCH = 64
DEFAULT_NEW_TOKENS = 256
DEFAULT_PROMPT_TOKENS = 512

TEXTS_PER_FILE = 32
_LONGEST_QUESTION = 256
_NO_LIMIT = 1 << 62  # long prompts are cut here, not refused


@dataclass(frozen=True)
class Written:
    """What a run has come to.

    Attributes:
        files: the texts.
        full: whether it ended because there was no room below the limit.
    """

    files: TapFiles
    full: bool


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers after which a model is tapped for EAGLE-3, of a very small one those of them that it has."""
    return tuple(sorted({max(1, min(tap, layers)) for tap in eagle3_taps(layers)}))


def check_batch(batch: int) -> None:
    """Raise RequestError for a number of texts that cannot be written at a time."""
    if not 1 <= batch <= ANSWERED_BEFORE:
        raise RequestError(f"batch is {batch}, expected 1 to {ANSWERED_BEFORE} texts at a time.")


def target_digest(manifest: Manifest) -> str:
    """What a folder of texts knows its target by. A bundle keeps it when a draft is added."""
    files = {
        name: record.sha256
        for name, record in sorted(manifest.files.items())
        if name in (TOKENIZER, CHAT_TEMPLATE) or (name.startswith("target/model") and name.endswith(".data"))
    }
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def write_texts(
    bundle: str | os.PathLike[str] | Bundle,
    prompts: PromptSource,
    folder: str | os.PathLike[str],
    *,
    tokens: int | None = None,
    texts: int | None = None,
    limit_bytes: int | None = None,
    taps: Sequence[int] | None = None,
    seed: int = 0,
    batch: int = DEFAULT_BATCH,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    max_prompt_tokens: int = DEFAULT_PROMPT_TOKENS,
    threads: int | None = None,
    progress: Progress = silent,
) -> Written:
    """Write texts, behind those that the folder has already.

    Args:
        bundle: its target writes; on disk, or opened.
        prompts: what is asked, each once.
        folder: where the texts go; see :mod:`edge_spec.distill.tap_files`.
        tokens: of answers that are enough; ``None`` for as many as the prompts bring.
        texts: that are enough.
        limit_bytes: most that the folder may take.
        taps: layers to tap; ``None`` for :func:`default_taps`, none to keep tokens and their probabilities only.
        seed: of the dice.
        batch: texts at a time.
        max_new_tokens: longest answer.
        max_prompt_tokens: longer prompts lose their beginning.
        threads: of the CPU; ``None`` for ONNX Runtime's choice.
        progress: told how many tokens of answers (or texts, if only they are counted) there are.

    Raises:
        RequestError: a setting is out of range, or the folder holds texts of something else.
        BundleError: there is no such bundle, or it is damaged.
    """
    for name, value in (("tokens", tokens), ("texts", texts), ("limit_bytes", limit_bytes)):
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}, expected at least 1.")
    check_batch(batch)
    if max_new_tokens < 1 or max_prompt_tokens < 1:
        raise RequestError("max_new_tokens and max_prompt_tokens must be at least 1.")
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    manifest = opened.manifest
    facts = manifest.target.architecture
    chosen = default_taps(facts.layers) if taps is None else tuple(taps)
    capacity = min(max_prompt_tokens + max_new_tokens, facts.context_length)
    if capacity <= max_new_tokens:
        raise RequestError(
            f"max_new_tokens is {max_new_tokens}, which leaves no room for a prompt in a context of "
            f"{facts.context_length}; ask for fewer."
        )
    target = TargetBatch(opened, chosen, batch, capacity, threads)
    header = TapHeader(
        target_digest(manifest), chosen, facts.hidden_size, target.top_tokens, seed, prompts.name, max_new_tokens
    )
    run = _Run(TapFiles.begin(folder, header), opened, prompts, capacity - max_new_tokens, tokens, texts)
    writer = BatchWriter(target, manifest.eos_token_ids, max_new_tokens, seed)
    return Written(run.files, run.write(writer, limit_bytes, progress))


class _Run:
    """Brings texts, which end in any order, into the order of their prompts, so that every file holds the next ones."""

    def __init__(
        self,
        files: TapFiles,
        bundle: Bundle,
        prompts: PromptSource,
        longest_prompt: int,
        tokens: int | None,
        texts: int | None,
    ) -> None:
        self.files = files
        self._prompts = prompts
        self._longest_prompt = longest_prompt
        self._tokens = tokens
        self._texts = len(prompts) if texts is None else min(texts, len(prompts))
        self._tokenizer = TextTokenizer(bundle.tokenizer_path)
        manifest = bundle.manifest
        template = bundle.chat_template()
        self._encoder = PromptEncoder(self._tokenizer, manifest, template, _NO_LIMIT)
        if isinstance(prompts, ListedPrompts):
            prompts.check(self._encoder.encode)
        self._next = len(files)
        # Those that have ended and are in no file yet, by their numbers.
        self._waiting: dict[int, TappedText] = {}

    def write(self, writer: BatchWriter, limit_bytes: int | None, progress: Progress) -> bool:
        """Write until there is enough; return whether the limit ended it."""
        self._tell(progress)
        if self._is_enough():
            return False
        for number, text in writer.write(self._prompt):
            self._waiting[number] = text
            while first := self._whole_file():
                if not self.files.append(first, limit_bytes):
                    return True
                for index in range(len(self.files) - len(first), len(self.files)):
                    del self._waiting[index]
                if self._is_enough():
                    self._tell(progress)
                    return False
            self._tell(progress)
        return False

    def _whole_file(self) -> list[TappedText]:
        """The texts of the next file, if all of them have ended."""
        begin = len(self.files)
        end = min(begin + TEXTS_PER_FILE, self._texts)
        if any(number not in self._waiting for number in range(begin, end)):
            return []
        return [self._waiting[number] for number in range(begin, end)]

    def _prompt(self) -> Prompt | None:
        """The next prompt, unless texts have to end first whose answers later prompts may build on."""
        oldest = len(self.files)
        while oldest in self._waiting:
            oldest += 1
        if self._next >= self._texts or self._next - oldest >= ANSWERED_BEFORE:
            return None
        number = self._next
        self._next += 1
        opening = self._prompts.opening(number, self._answer_to)
        if opening is Asker.TARGET:
            frame = self._frame
            room = self._longest_prompt - len(frame.before) - len(frame.behind)
            if room < 1:
                raise RequestError(
                    f"A prompt has {self._longest_prompt} tokens at most, which the chat template takes alone; let "
                    "answers be shorter, or give a file of prompts."
                )
            return Prompt(number, frame.before, OwnQuestion(frame.behind, min(room, _LONGEST_QUESTION)))
        return Prompt(number, self._encoder.encode(opening)[-self._longest_prompt :])

    @cached_property
    def _frame(self) -> ChatFrame:
        return chat_frame(self._encoder.encode)

    def _answer_to(self, number: int) -> str:
        text = self._waiting[number] if number in self._waiting else self.files.read(number)
        return self._tokenizer.decode([int(token) for token in text.token_ids[text.prompt_length :]]).strip()

    def _is_enough(self) -> bool:
        enough = self._tokens is not None and self.files.answer_tokens >= self._tokens
        return enough or len(self.files) >= self._texts

    def _tell(self, progress: Progress) -> None:
        waiting = self._waiting.values()
        if self._tokens is None:
            progress("writing texts", len(self.files) + len(waiting), self._texts)
        else:
            done = self.files.answer_tokens + sum(text.answer_length for text in waiting)
            progress("writing texts", min(done, self._tokens), self._tokens)
