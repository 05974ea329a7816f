"""A loaded pair: turns requests into generations."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edge_spec.bundle import Bundle, Manifest, ModelRecord, open_bundle
from edge_spec.errors import BundleError, RequestError
from edge_spec.processor import integer_products_saturate
from edge_spec.runtime.chat_template import ChatTemplate, checked_messages
from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.runtime.context import Context
from edge_spec.runtime.drafters.lookup import LookupDrafter
from edge_spec.runtime.drafters.model import ModelDrafter
from edge_spec.runtime.drafters.protocol import Drafter
from edge_spec.runtime.loop import decode, prefill
from edge_spec.runtime.model import Model
from edge_spec.runtime.options import GenerationOptions
from edge_spec.runtime.output import Output
from edge_spec.runtime.provider import select_provider
from edge_spec.runtime.sampling import SamplingParams, stop_strings
from edge_spec.runtime.statistics import Statistics
from edge_spec.runtime.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

# Tokens of context where the caller does not say: the cache of a long one would not fit a small device.
DEFAULT_CONTEXT = 4096

# Beyond the number of cores, threads only wait for each other; thousands would seem to hang.
MOST_THREADS = 256


def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    context: int | None = None,
    threads: int | None = None,
) -> Engine:
    """Load a pair bundle.

    Args:
        path: the bundle's folder, as written by ``edge-spec export``.
        device: ``"auto"`` runs on what the bundle is for; ``"cpu"`` and ``"cuda"`` insist.
        context: most tokens of prompt and output together; by default 4096, or the model's limit if that is less.
        threads: CPU threads, by default one per physical core.

    Raises:
        BundleError: the bundle is missing, damaged, newer than this reader, or made for another processor.
        ProviderError: ``device`` does not work here.
        MissingDependencyError: ONNX Runtime is not installed.
        RequestError: an argument is out of range.
    """
    return Engine(open_bundle(path), device, context, threads)


class Engine:
    """A loaded pair and its caches; serves one generation at a time.

    Attributes:
        manifest: what the bundle says of itself.
        context: most tokens of prompt and output together.
    """

    def __init__(self, bundle: Bundle, device: str, context: int | None, threads: int | None) -> None:
        """Load both models; see :func:`load`."""
        self.manifest: Manifest = bundle.manifest
        limit = self.manifest.context_length
        self.context = min(DEFAULT_CONTEXT, limit) if context is None else _checked_count("context", context, 2)
        if self.context > limit:
            raise RequestError(f"context is {context}, expected at most {limit}, the limit of this bundle's target.")
        if threads is not None and _checked_count("threads", threads, 1) > MOST_THREADS:
            raise RequestError(f"threads is {threads}, expected at most {MOST_THREADS}; one per physical core is best.")
        providers = select_provider(device, self.manifest.device)
        _require_exact_integers(bundle)

        def model(record: ModelRecord, exact_rows: bool) -> Model:
            context = min(self.context, record.architecture.context_length)
            return Model(bundle, record, providers, context, exact_rows, threads)

        self._tokenizer = TextTokenizer(bundle.tokenizer_path)
        self._template_source = bundle.chat_template()
        self._target = model(self.manifest.target, exact_rows=True)
        self._drafters: dict[str, Drafter] = {}
        if self.manifest.draft is not None:
            self._drafters["model"] = ModelDrafter(model(self.manifest.draft, exact_rows=False))
        self._drafters["lookup"] = LookupDrafter()
        self._serving: Context | None = None
        self._closed = False

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names usable as ``speculation``, the one ``"auto"`` picks first."""
        return tuple(self._drafters)

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
        stop: str | Sequence[str] = (),
        speculation: str = "auto",
        max_draft: int | None = None,
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
            stop: strings the text ends before.
            speculation: ``"auto"``, ``"off"`` or the name of a drafter. Never changes what is generated at
                temperature 0, and never its distribution.
            max_draft: most tokens proposed per target call.

        Raises:
            RequestError: an option is out of range, the prompt does not fit, or the engine is busy.
        """
        self._require_idle()
        sampling = SamplingParams(temperature, top_k, top_p, min_p, seed, max_new_tokens, stop_strings(stop))
        if not sampling.greedy:
            sampling = sampling.seeded()
        drafter = self._choose_drafter(speculation)
        if max_draft is None:
            max_draft = 0 if drafter is None else drafter.default_budget
        max_draft = _checked_count("max_draft", max_draft, 0)
        tokens = self._encode(prompt_or_messages)
        return self._generate(Context(tokens, sampling), drafter, max_draft)

    def close(self) -> None:
        """Free the models; the engine cannot generate any more. Closing twice does no harm."""
        self._closed = True
        self._drafters.clear()
        if hasattr(self, "_target"):
            del self._target

    def __enter__(self) -> Engine:
        """Return the engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()

    def _generate(self, context: Context, drafter: Drafter | None, max_draft: int) -> Iterator[Chunk]:
        started = perf_counter()
        self._require_idle()
        self._serving = context
        try:
            sampling = context.sampling
            seed = None if sampling.greedy else sampling.seed
            statistics = Statistics(prompt_tokens=len(context.tokens), seed=seed)
            output = Output(
                self._tokenizer, sampling, self.manifest.eos_token_ids, room=self.context - len(context.tokens)
            )
            self._target.cache.rollback(0)
            if drafter is not None:
                drafter.rollback(0)
            prefill(self._target, context)
            statistics.record_prefill(perf_counter() - started)
            max_length = len(context.tokens) + output.limit
            for round_ in decode(self._target, drafter, context, max_draft, max_length):
                text, emitted = output.push(round_.tokens)
                statistics.record(round_, len(emitted))
                origins = tuple(
                    round_.drafter if index < round_.accepted and round_.drafter else "target"
                    for index in range(len(emitted))
                )
                if output.finish_reason is None:
                    yield Chunk(text, emitted, origins)
                    continue
                completion = Completion(output.text, tuple(output.token_ids), output.finish_reason, statistics)
                self._release(context)  # whoever stops reading at the last chunk leaves the engine free
                yield Chunk(text, emitted, origins, completion)
                return
        finally:
            self._release(context)

    def _require_idle(self) -> None:
        if self._closed:
            raise RequestError("This engine is closed; load the bundle again.")
        if self._serving is not None:
            raise RequestError(
                "This engine is already generating. Exhaust or close the other stream first, or load another engine."
            )

    def _release(self, context: Context) -> None:
        if self._serving is context:
            self._serving = None

    def _choose_drafter(self, speculation: str) -> Drafter | None:
        if speculation == "off":
            return None
        if speculation == "auto":
            return next(iter(self._drafters.values()))
        if speculation not in self.drafters:
            known = ", ".join(repr(name) for name in ("auto", "off", *self._drafters))
            hint = " This bundle has no draft model." if speculation == "model" else ""
            raise RequestError(f"speculation is {speculation!r}, expected one of {known}.{hint}")
        return self._drafters[speculation]

    @cached_property
    def _template(self) -> ChatTemplate:
        """The chat template, read when somebody chats: a broken one is no obstacle to continuing text."""
        if self._template_source is None:
            raise RequestError("This bundle has no chat template; give the prompt as text instead of messages.")
        return ChatTemplate(self._template_source, self.manifest.named_tokens)

    def _encode(self, prompt: Prompt | Sequence[Message]) -> list[int]:
        """Turn a prompt into token ids that fit the context with room for at least one more."""
        tokens: list[int]
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt)
        elif isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__"):
            raise RequestError(
                f"The prompt is a {type(prompt).__name__}; expected text, a sequence of token ids, or chat messages."
            )
        elif len(prompt) and isinstance(prompt[0], Mapping):
            tokens = self._tokenizer.encode(self._template.render(prompt), add_special_tokens=False)  # type: ignore[arg-type]
        else:
            tokens = _checked_ids(prompt, self.manifest.vocab_size)
        if not tokens:
            raise RequestError("The prompt is empty; expected at least one token.")
        if len(tokens) >= self.context:
            raise RequestError(
                f"The prompt has {len(tokens)} tokens, which leaves no room in the context of {self.context}; shorten "
                f"it, or load the bundle with a larger context (up to {self.manifest.context_length})."
            )
        return tokens


def _checked_count(name: str, value: object, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < lowest:
        raise RequestError(f"{name} is {value!r}, expected an integer of at least {lowest}.")
    return int(value)


def _last(chunks: Iterator[Chunk]) -> Completion:
    completion = None
    for chunk in chunks:
        completion = chunk.completion
    assert completion is not None  # every stream ends with one
    return completion


def _checked_ids(prompt: Sequence[Any], vocab_size: int) -> list[int]:
    ids = []
    for token in prompt:
        try:
            index = operator.index(token)
        except TypeError:
            index = None
        if index is None or isinstance(token, bool):
            raise RequestError(
                f"The prompt holds {token!r}; expected text, a sequence of integer token ids, or chat messages."
            )
        if not 0 <= index < vocab_size:
            raise RequestError(f"Token id {index} is out of range; this vocabulary has ids 0 to {vocab_size - 1}.")
        ids.append(index)
    return ids


def _require_exact_integers(bundle: Bundle) -> None:
    """Refuse int8 weights on a processor that would saturate their products."""
    manifest = bundle.manifest
    models = [record for record in (manifest.target, manifest.draft) if record is not None]
    if manifest.device != "cpu" or all(record.integer_weights != "int8" for record in models):
        return
    if integer_products_saturate():
        raise BundleError(
            f"{bundle.path} holds int8 weights, whose products overflow on this processor (x86 without VNNI). "
            "Export it again on this machine, which stores them in a form that is exact here."
        )
