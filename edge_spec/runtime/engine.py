"""A loaded pair: turns requests into generations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from edge_spec.bundle import TOKENIZER, Bundle, Manifest, open_bundle
from edge_spec.errors import RequestError
from edge_spec.runtime.calibration import Calibration, Progress
from edge_spec.runtime.chat_template import checked_messages
from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafter_pool import DrafterPool
from edge_spec.runtime.drafters.lookup import LookupDrafter
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.ngram_table import NgramTable
from edge_spec.runtime.drafters.protocol import Drafter
from edge_spec.runtime.drafters.recycling import RecyclingDrafter
from edge_spec.runtime.drafters.suffix import SuffixDrafter
from edge_spec.runtime.exactness import Exactness
from edge_spec.runtime.loaded_pair import load_pair
from edge_spec.runtime.logits_processors import LogitsPipeline, LogitsProcessor
from edge_spec.runtime.logprobs import TokenLogprobs
from edge_spec.runtime.loop import Round, decode, prefill
from edge_spec.runtime.model import PREFILL_ROWS
from edge_spec.runtime.options import GenerationOptions
from edge_spec.runtime.output import Output
from edge_spec.runtime.prompt import Message, Prompt, PromptEncoder
from edge_spec.runtime.provider import select_provider
from edge_spec.runtime.sampling_params import SamplingParams
from edge_spec.runtime.speculation import Speculation
from edge_spec.runtime.statistics import Statistics
from edge_spec.runtime.verification import RULES, Rule

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Tokens of context where the caller does not say: the cache of a long one would not fit a small device.
DEFAULT_CONTEXT = 4096

# Beyond the number of cores, threads only wait for each other; thousands would seem to hang.
MOST_THREADS = 256


def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    context: int | None = None,
    threads: int | None = None,
    exactness: Exactness | None = None,
    calibration: Calibration | Literal["fresh"] | None = None,
    progress: Progress | None = None,
    ngram_table: str | os.PathLike[str] | None = None,
) -> Engine:
    """Load a pair bundle.

    Args:
        path: the bundle's folder, as written by ``edge-spec export``.
        device: ``"auto"`` runs on what the bundle is for; ``"cpu"`` and ``"cuda"`` insist.
        context: most tokens of prompt and output together; by default 4096, or the model's limit if that is less.
        threads: CPU threads, by default one per physical core.
        exactness: what is owed. ``"bitwise"``: speculation changes no bit; measured while loading, and where kernels
            depend on the width of a call, reached by giving every call the same. ``"distribution"``: the text follows
            the same law. By default bitwise where that holds by itself.
        calibration: what calls cost here; by default measured at the first load, which takes seconds, and remembered.
            ``"fresh"`` measures even what was measured before.
        progress: told what is being measured, and which share of it is done.
        ngram_table: a file written by :meth:`Engine.save_ngram_table`, from which drafting knows what was said before;
            need not exist.

    Raises:
        BundleError: the bundle is missing, damaged, written by another version's format, or made for another processor.
        ProviderError: ``device`` does not work here.
        MissingDependencyError: ONNX Runtime is not installed.
        RequestError: an argument is out of range, or there is not enough memory.
    """
    try:
        return Engine(open_bundle(path), device, context, threads, exactness, calibration, progress, ngram_table)
    except MemoryError as error:
        raise RequestError(f"There is not enough memory to load {path}; load it with a smaller context.") from error


class Engine:
    """A loaded pair and its caches; serves one generation at a time.

    Attributes:
        manifest: what the bundle says of itself.
        context: most tokens of prompt and output together; a little less than asked for where the target runs at a
            fixed width and the context was the model's limit.
        exactness: the level that holds here, as measured or as asked for.
        calibration: what calls of target and draft cost here.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: str,
        context: int | None,
        threads: int | None,
        exactness: Exactness | None,
        calibration: Calibration | Literal["fresh"] | None = None,
        progress: Progress | None = None,
        ngram_table: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Load both models; see :func:`load`."""
        self.manifest: Manifest = bundle.manifest
        limit = self.manifest.context_length
        self.context = min(DEFAULT_CONTEXT, limit) if context is None else _checked_count("context", context, 2)
        if self.context > limit:
            raise RequestError(f"context is {context}, expected at most {limit}, the limit of this bundle's target.")
        if threads is not None:
            threads = _checked_count("threads", threads, 1)
            if threads > MOST_THREADS:
                raise RequestError(
                    f"threads is {threads}, expected at most {MOST_THREADS}; one per physical core is best."
                )
        if exactness not in (None, *get_args(Exactness)):
            raise RequestError(f"exactness is {exactness!r}, expected 'bitwise', 'distribution' or None.")
        if calibration not in (None, "fresh") and not isinstance(calibration, Calibration):
            raise RequestError(f"calibration is {calibration!r}, expected a Calibration, 'fresh' or None.")
        providers = select_provider(device, self.manifest.device)
        ngrams = _open_ngrams(ngram_table, self.manifest)
        pair = load_pair(bundle, providers, self.context, threads, exactness, calibration, progress)
        self._target, self.exactness, self.calibration = pair.target, pair.exactness, pair.calibration
        self.context = self._target.context
        self._tokenizer = pair.tokenizer
        self._prompts = PromptEncoder(self._tokenizer, self.manifest, bundle.chat_template(), self.context)
        self._ngrams = ngrams
        free = (SuffixDrafter(ngrams), RecyclingDrafter())
        model = None
        if pair.draft is not None:
            model = ModelDrafter(pair.draft, on_call=self.calibration.costs.observe_draft, clock=clock)
        self._drafters = DrafterPool(self.calibration, self.manifest.vocab_size, free, (LookupDrafter(),), model, clock)
        self._clock = clock
        self._serving: Context | None = None
        self._admission = Lock()
        self._closed = False

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names usable as ``speculation``, besides ``"auto"`` and ``"off"``."""
        self._require_open()
        return self._drafters.names

    def add_drafter(self, drafter: Drafter) -> None:
        """Let requests use a drafter of the app's own, by its name and within ``"auto"``.

        Within ``"auto"`` it is asked in every round, so it should take no more than microseconds. An exception, or a
        proposal that cannot be verified, is logged, and the drafter is then left alone until the next text.

        Raises:
            RequestError: it is no drafter, or its name is taken.
        """
        self._require_open()
        self._drafters.add(drafter)

    def save_ngram_table(self, path: str | os.PathLike[str]) -> None:
        """Write what drafting has learned from generated texts, and so pieces of them, to a file for :func:`load`.

        Raises:
            RequestError: the engine is generating, or closed.
            BundleError: the file cannot be written; an older one is then still there.
        """
        self._require_idle()
        self._drafters.rollback(0)  # makes the last text known
        self._ngrams.save(Path(path))

    def generate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Completion:
        """Continue ``prompt`` and return the whole completion; see :meth:`stream` for the options."""
        return _last(self.stream(prompt, **options))

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerationOptions]) -> Completion:
        """Answer ``messages``, such as ``[{"role": "user", "content": "Hi"}]``; see :meth:`stream` for the options."""
        return _last(self.stream(checked_messages(messages), **options))

    def stream(
        self,
        prompt_or_messages: Prompt | Sequence[Message],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        allowed_token_ids: Iterable[int] | None = None,
        banned_token_ids: Iterable[int] = (),
        logits_processors: Iterable[LogitsProcessor] = (),
        stop: str | Sequence[str] = (),
        stop_token_ids: Iterable[int] = (),
        deadline: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        logprobs: int | None = None,
        speculation: str = "auto",
        verification: str | None = None,
        max_draft: int | None = None,
        tree: bool = True,
    ) -> Iterator[Chunk]:
        """Generate, yielding a chunk per target call; the last one carries the completion.

        Args:
            prompt_or_messages: text, token ids, or chat messages for the model's template.
            max_new_tokens: most tokens to emit.
            temperature: 0 always takes the likeliest token.
            top_k: keep only the k likeliest tokens; 0 keeps all.
            top_p: keep only the likeliest tokens, up to this mass; 1 keeps all.
            min_p: keep only tokens at least this likely, relative to the likeliest; 0 keeps all.
            seed: keys the noise; ``None`` draws one, which the statistics report.
            repetition_penalty: above 1, tokens of prompt and output become less likely.
            presence_penalty: taken from the logits of tokens that the output has.
            frequency_penalty: taken from them once for each time they occur.
            logit_bias: added to the logits, by token id.
            allowed_token_ids: only these tokens remain; ``None`` allows all.
            banned_token_ids: these do not.
            logits_processors: rules of the app's own, see :class:`edge_spec.LogitsProcessor`.
            stop: strings the text ends before.
            stop_token_ids: tokens the text ends at, besides the model's own.
            deadline: seconds from now after which the text ends.
            cancelled: asked before every token whether to end, for example ``threading.Event().is_set``.
            logprobs: report the target's log-probability of each emitted token and of so many likeliest ones.
            speculation: ``"auto"`` (by measured cost, from all drafters), ``"off"`` or the name of a drafter.
            verification: which draft tokens are kept: ``"coupled"`` (the default: with a seed, the same text whoever
                drafts), ``"token"``, ``"block"`` or ``"traversal"`` (the same distribution).
            max_draft: most tokens proposed per target call. With the name of a drafter: propose so many in every
                call, whatever it costs.
            tree: whether proposals may branch, where that pays.

        Raises:
            RequestError: an option is out of range, the prompt does not fit, or the engine is busy.
            LogitsError: while generating, if a step leaves no token to choose.
        """
        self._require_idle()
        given: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "stop": stop,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": logit_bias or (),
            "allowed_token_ids": allowed_token_ids,
            "banned_token_ids": banned_token_ids,
            "stop_token_ids": stop_token_ids,
            "logprobs": logprobs,
            "deadline": deadline,
        }
        sampling = SamplingParams(**given)
        sampling.require_vocabulary(self.manifest.vocab_size)
        if not sampling.greedy:
            sampling = sampling.seeded()
        if max_draft is not None:
            max_draft = _checked_count("max_draft", max_draft, 0)
            if max_draft >= PREFILL_ROWS:
                raise RequestError(f"max_draft is {max_draft}, expected at most {PREFILL_ROWS - 1}.")
        if not isinstance(tree, bool):
            raise RequestError(f"tree is {tree!r}, expected True or False.")
        rule = _choose_rule(verification)
        if cancelled is not None and not callable(cancelled):
            raise RequestError(f"cancelled is {cancelled!r}, expected a function without arguments.")
        pipeline = LogitsPipeline(sampling, logits_processors)
        context = Context(self._prompts.encode(prompt_or_messages), sampling, pipeline, rule.coupled)
        branches = tree and self._target.takes_trees and (sampling.greedy or rule.trees)
        # Only the coupled rule owes the same bits; the others owe the same law, which branches obey.
        defer = self.exactness == "bitwise" and (sampling.greedy or rule.coupled)
        choice = self._drafters.speculation(speculation, max_draft, branches, defer, self._target.widest_tree)
        return self._generate(context, choice, rule, defer, cancelled)

    def close(self) -> None:
        """Free the models; the engine cannot generate any more. Closing twice does no harm."""
        self._closed = True
        for part in ("_target", "_drafters"):
            if hasattr(self, part):
                delattr(self, part)

    def __enter__(self) -> Engine:
        """Return the engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()

    def _generate(
        self,
        context: Context,
        speculation: Speculation | None,
        rule: Rule,
        defer: bool,
        cancelled: Callable[[], bool] | None,
    ) -> Iterator[Chunk]:
        started = self._clock()
        with self._admission:
            self._require_idle()
            self._serving = context
        try:
            sampling = context.sampling
            seed = None if sampling.greedy else sampling.seed
            statistics = Statistics(prompt_tokens=len(context.tokens), seed=seed)
            prompt_length = len(context.tokens)
            output = Output(
                self._tokenizer,
                sampling,
                self.manifest.eos_token_ids,
                room=self.context - prompt_length,
                cancelled=cancelled,
                started=started,
                clock=self._clock,
            )
            self._rollback(0)
            if output.finish_reason is None:
                prefill(self._target, context)
            statistics.record_prefill(self._clock() - started)
            length = prompt_length + output.limit
            observe = self.calibration.costs.observe_verify
            rounds = decode(self._target, speculation, context, rule, length, defer, observe, self._clock)
            logprobs: list[TokenLogprobs] = []
            while True:
                self._require_open()
                chunk = Chunk(output.poll(), (), ())
                if output.finish_reason is None:
                    round_ = next(rounds)
                    text, emitted = output.push(round_.tokens)
                    statistics.record(round_, len(emitted))
                    chunk = _chunk(text, emitted, round_)
                    logprobs.extend(chunk.logprobs or ())
                if output.finish_reason is None:
                    yield chunk
                    continue
                # What lies behind the end of the text is nobody's past.
                context.history.rollback(prompt_length + len(output.token_ids))
                self._rollback(len(context.tokens))
                completion = Completion(
                    output.text,
                    tuple(output.token_ids),
                    output.finish_reason,
                    statistics,
                    None if sampling.logprobs is None else tuple(logprobs),
                )
                self._release(context)  # whoever stops reading at the last chunk leaves the engine free
                yield replace(chunk, completion=completion)
                return
        finally:
            self._release(context)

    def _rollback(self, length: int) -> None:
        self._target.cache.rollback(min(length, self._target.cache.length))
        self._drafters.rollback(length)

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("This engine is closed; load the bundle again.")

    def _require_idle(self) -> None:
        self._require_open()
        if self._serving is not None:
            raise RequestError(
                "This engine is already generating. Exhaust or close the other stream first, or load another engine."
            )

    def _release(self, context: Context) -> None:
        if self._serving is context:
            self._serving = None


def _choose_rule(verification: str | None) -> Rule:
    name = "coupled" if verification is None else verification
    if name not in tuple(RULES):
        known = ", ".join(map(repr, RULES))
        raise RequestError(f"verification is {verification!r}, expected one of {known}.")
    return RULES[name]


def _chunk(text: str, emitted: tuple[int, ...], round_: Round) -> Chunk:
    """Describe what a round added: of its tokens only those that were emitted."""
    logprobs = None if round_.logprobs is None else round_.logprobs[: len(emitted)]
    return Chunk(text, emitted, round_.origins[: len(emitted)], logprobs=logprobs)


def _checked_count(name: str, value: Any, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < lowest:
        raise RequestError(f"{name} is {value!r}, expected an integer of at least {lowest}.")
    return int(value)


def _last(chunks: Iterator[Chunk]) -> Completion:
    completion = None
    for chunk in chunks:
        completion = chunk.completion
    assert completion is not None  # every stream ends with one
    return completion


def _open_ngrams(path: str | os.PathLike[str] | None, manifest: Manifest) -> NgramTable:
    """The saved table, if there is one; a table is of use with one tokenizer only."""
    if path is not None and not isinstance(path, str | os.PathLike):
        raise RequestError(f"ngram_table is {path!r}, expected a path.")
    tokenizer = manifest.files[TOKENIZER].sha256
    if path is not None and Path(path).exists():
        return NgramTable.load(Path(path), tokenizer, manifest.vocab_size)
    return NgramTable(tokenizer, manifest.vocab_size)
