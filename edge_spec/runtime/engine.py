"""A loaded pair: turns requests into generations."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, get_args

from edge_spec.bundle import Bundle
from edge_spec.errors import RequestError
from edge_spec.heap import give_back
from edge_spec.manifest import TOKENIZER, CacheType, Manifest
from edge_spec.runtime.answers import Answers
from edge_spec.runtime.askable import Askable
from edge_spec.runtime.cache_pool import CachedText, CachePool
from edge_spec.runtime.calibration import Calibration
from edge_spec.runtime.calibration_cache import kept_calibrations
from edge_spec.runtime.completion import Chunk
from edge_spec.runtime.configuration import DrafterChoice
from edge_spec.runtime.cuda_features import settings_for
from edge_spec.runtime.device_memory import GpuMemory, find_gpu
from edge_spec.runtime.draft_measurement import Progress
from edge_spec.runtime.drafter_pool import DrafterPool
from edge_spec.runtime.drafters.lookup import LookupDrafter
from edge_spec.runtime.drafters.ngram_table import NgramTable
from edge_spec.runtime.drafters.of_pair import drafter_of_pair
from edge_spec.runtime.drafters.protocol import Drafter
from edge_spec.runtime.drafters.recycling import RecyclingDrafter
from edge_spec.runtime.drafters.suffix import SuffixDrafter
from edge_spec.runtime.engine_statistics import EngineMemory, EngineStatistics, Totals
from edge_spec.runtime.exactness import Exactness
from edge_spec.runtime.free_memory import available_memory
from edge_spec.runtime.grammar import Grammar
from edge_spec.runtime.grammar_vocabulary import GrammarVocabulary
from edge_spec.runtime.int8_cache import cache_types
from edge_spec.runtime.loaded_pair import load_pair
from edge_spec.runtime.logits_processors import LogitsProcessor
from edge_spec.runtime.memory import drafters_of, plan_memory
from edge_spec.runtime.memory_budget import MemoryBudget
from edge_spec.runtime.memory_failure import loading_failure, ran_out_of_memory
from edge_spec.runtime.memory_pools import pools_here
from edge_spec.runtime.memory_profile import read_profile, resident_memory
from edge_spec.runtime.options import GenerationOptions
from edge_spec.runtime.pool_pressure import usual_reserves, watch_pools
from edge_spec.runtime.prompt import Message, Prompt, PromptEncoder
from edge_spec.runtime.provider import select_provider
from edge_spec.runtime.request import Request, RequestReader, checked_count
from edge_spec.runtime.session import Session
from edge_spec.runtime.shedding import sheddable_parts
from edge_spec.runtime.turns import Turns

_LOG = logging.getLogger(__name__)

# Beyond the number of cores, threads only wait for each other; thousands would seem to hang.
MOST_THREADS = 256


class Engine(Askable):
    """A loaded pair and its caches.

    Threads may share it, and one thread may read several streams: texts take turns, a target call each, as many at once
    as their caches have room (``conversations`` of :func:`edge_spec.load`), and the others wait in the order in which
    they came. What a request has in common with an earlier text is not read again; :meth:`session` keeps the cache of
    one conversation apart from all others.

    Attributes:
        manifest: what the bundle says of itself.
        plan: what of the bundle was loaded how, and the memory that this takes. Where the draft could have been on the
            GPU or on the CPU, that of the faster one.
        context: most tokens of prompt and output together; a little less than asked for where the target runs at a
            fixed width and the context was the model's limit.
        exactness: the level that holds here, as measured or as asked for.
        calibration: what calls of target and draft cost here.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: str = "auto",
        memory_budget: MemoryBudget = None,
        context: int | None = None,
        conversations: int = 1,
        kv: CacheType | None = None,
        threads: int | None = None,
        exactness: Exactness | None = None,
        calibration: Calibration | Literal["fresh"] | None = None,
        progress: Progress | None = None,
        ngram_table: str | os.PathLike[str] | None = None,
        drafter: DrafterChoice = "auto",
        available: Callable[[], int | None] = available_memory,
        find_gpu: Callable[[], GpuMemory | None] = find_gpu,
        memory_reserve: int | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Load both models; see :func:`edge_spec.load`."""
        self.manifest: Manifest = bundle.manifest
        if context is not None:
            context = checked_count("context", context, 2)
        conversations = checked_count("conversations", conversations, 1)
        if threads is not None:
            threads = checked_count("threads", threads, 1)
            if threads > MOST_THREADS:
                raise RequestError(
                    f"threads is {threads}, expected at most {MOST_THREADS}; one per physical core is best."
                )
        if exactness not in (None, *get_args(Exactness)):
            raise RequestError(f"exactness is {exactness!r}, expected 'bitwise', 'distribution' or None.")
        if calibration not in (None, "fresh") and not isinstance(calibration, Calibration):
            raise RequestError(f"calibration is {calibration!r}, expected a Calibration, 'fresh' or None.")
        pools = pools_here(self.manifest, available, find_gpu)
        budget, host_budget = pools.budgets(memory_budget)  # before CUDA takes what the plan counts
        providers = select_provider(device, self.manifest.device)
        kv_types, profile = cache_types(self.manifest, kv), read_profile(self.manifest)
        kept = kept_calibrations(self.manifest) if self.manifest.head is not None else ()
        plan = plan_memory(
            self.manifest, budget, context, conversations, kv_types, profile, pools.kind, host_budget, drafter, kept
        ).require_fit()
        reserves = usual_reserves(pools, plan, resident_memory() or 0)
        for loss in plan.given_up:
            _LOG.warning("short of memory: %s", loss)
        try:
            pair = load_pair(
                bundle,
                providers,
                [possible.configuration for possible in plan.possible],
                threads,
                exactness,
                calibration,
                progress,
                pools.device_taken,
                plan.arena_bytes(weights=not settings_for(providers).shares_weights),
            )
        except Exception as error:
            if ran_out_of_memory(error):
                raise loading_failure(plan, error) from error
            raise
        configuration = pair.configuration
        self.plan = next(possible for possible in plan.possible if possible.configuration == configuration)
        self._target, self.exactness, self.calibration = pair.target, pair.exactness, pair.calibration
        self.context = self._target.context
        self._tokenizer = pair.tokenizer
        model = drafter_of_pair(
            pair, self.manifest, configuration.draft_window, self.calibration.costs.observe_draft, clock
        )
        ngrams = _open_ngrams(ngram_table, self.manifest)
        self._suffix = SuffixDrafter(ngrams)
        free = (self._suffix, RecyclingDrafter())
        self._caches = CachePool(self._target, configuration.conversations * self._target.cache.limit)
        turns = Turns(self._caches.slots)
        self._turns = turns
        self._drafters = DrafterPool(
            self.calibration,
            self.manifest.vocab_size,
            free,
            (LookupDrafter(),),
            model,
            clock,
            lambda: turns.waiting,
            [name for name in drafters_of(self.manifest) if model is None or model.name != name],
        )
        parts = sheddable_parts(
            self._suffix,
            partial(_open_ngrams, None, self.manifest),  # not the engine: what it holds must not hold it
            self._caches,
            model,
            self._drafters,
            pair,
            self.plan,
        )
        if memory_reserve is not None:
            reserves = dict.fromkeys(reserves, memory_reserve)
        self._pressure = watch_pools(parts, pools, reserves, give_back, clock)
        self._prompts = PromptEncoder(self._tokenizer, self.manifest, bundle.chat_template(), self.context)
        self._requests = RequestReader(
            self._prompts,
            self._drafters,
            self.manifest.vocab_size,
            self.exactness,
            self._target.takes_trees,
            self._target.moves_slots,
            min(configuration.widest, self._target.widest_tree),
            GrammarVocabulary(
                self._tokenizer, self.manifest.eos_token_ids, self.manifest.named_tokens.get("eos_token")
            ),
        )
        self._totals = Totals()
        self._answers = Answers(
            self._target,
            pair.tokenizer,
            self.manifest.eos_token_ids,
            self._drafters,
            self._caches,
            self._turns,
            self._pressure,
            self._totals,
            self.exactness == "distribution",
            self.calibration.costs.observe_verify,
            clock,
        )
        self._process = os.getpid()
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
        """Write what drafting has learned from generated texts, and so pieces of them, for :func:`edge_spec.load`.

        Raises:
            RequestError: the engine is closed, or had to give up what it knew.
            BundleError: the file cannot be written; an older one is then still there.
        """
        ticket = self._turns.enter(0)
        try:
            with self._turns.turn(ticket):
                self._require_open()
                if self._suffix.table is None:
                    raise RequestError("What was learned from other texts had to be given up, since memory is short.")
                self._suffix.table.save(Path(path))
        finally:
            self._turns.leave(ticket)

    def encode(
        self, prompt_or_messages: Prompt | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the token ids that :meth:`stream` would read, and that it takes in place of the prompt.

        Args:
            prompt_or_messages: text, token ids, or chat messages for the model's template.
            tools: functions the model may call, each as a mapping with a JSON schema, for the template.

        Raises:
            PromptTooLongError: the prompt leaves no room for an answer.
            RequestError: the prompt is malformed, the template takes no tools, or the engine is closed.
        """
        self._require_open()
        return self._prompts.encode(prompt_or_messages, tools)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text that has begun, in UTF-8; possibly a part of a character.

        Raises:
            RequestError: it is not an integer that fits 32 bits without sign.
        """
        self._require_open()
        return self._tokenizer.token_bytes(token_id)

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
        grammar: Grammar | None = None,
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
            grammar: what the text has to be, such as ``edge_spec.Grammar.json_schema({...})``. A text that ends
                before its time, for example by ``max_new_tokens``, is the beginning of such a one.
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
            RequestError: an option is out of range, or the prompt does not fit.
            LogitsError: while generating, if a step leaves no token to choose.
            MissingDependencyError: there is a grammar, but no llguidance.
        """
        options: GenerationOptions = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": logit_bias or {},
            "allowed_token_ids": allowed_token_ids,
            "banned_token_ids": banned_token_ids,
            "logits_processors": logits_processors,
            "grammar": grammar,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "deadline": deadline,
            "cancelled": cancelled,
            "logprobs": logprobs,
            "speculation": speculation,
            "verification": verification,
            "max_draft": max_draft,
            "tree": tree,
        }
        return self._stream(None, prompt_or_messages, options)

    @property
    def running(self) -> int:
        """How many texts are being written now."""
        return self._turns.running

    @property
    def waiting(self) -> int:
        """How many requests want a turn that they do not have."""
        return self._turns.waiting

    def statistics(self) -> EngineStatistics:
        """What was generated since loading, and where memory stands."""
        self._require_open()
        memory = EngineMemory(self.plan.process_bytes, resident_memory(), self._caches.cache_bytes)
        return self._totals.statistics(self.running, self.waiting, memory)

    def session(self) -> Session:
        """Begin a conversation with a cache of its own; see :class:`edge_spec.Session`."""
        self._require_open()
        return Session(self._caches.add(), self._stream, self._forget)

    def close(self) -> None:
        """Free the models, or let go of them where another thread is generating, which then gets an error.

        The engine cannot generate any more. Closing twice does no harm.
        """
        if not self._closed:
            self._closed = True
            self._caches.clear()
            del self._target, self._drafters, self._requests, self._caches, self._suffix, self._pressure, self._answers
            give_back()

    def __enter__(self) -> Engine:
        """Return the engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()

    def _stream(
        self, text: CachedText | None, prompt: Prompt | Sequence[Message], options: Mapping[str, Any]
    ) -> Iterator[Chunk]:
        """Check a request, and begin to answer it once somebody reads the answer."""
        self._require_open()
        return self._answer(text, self._requests.read(prompt, options))

    def _answer(self, text: CachedText | None, request: Request) -> Iterator[Chunk]:
        self._require_open()
        # Whoever closes the engine meanwhile takes this from it, and not from the answer.
        yield from self._answers.answer(request, text, self._require_open, lambda: self._closed)

    def _forget(self, text: CachedText) -> None:
        if not self._closed:
            self._caches.remove(text)

    def _require_open(self) -> None:
        if os.getpid() != self._process:
            raise RequestError(
                "This engine was loaded before the process was forked, and its threads did not come along. Load the "
                "bundle in the new process, or start that with multiprocessing's 'spawn'."
            )
        if self._closed:  # last, since threads take turns at calls: what follows finds the engine as it is here
            raise RequestError("This engine is closed; load the bundle again.")


def _open_ngrams(path: str | os.PathLike[str] | None, manifest: Manifest) -> NgramTable:
    """The saved table, if there is one; a table is of use with one tokenizer only."""
    given: object = path
    if given is not None and not (isinstance(given, str | os.PathLike) and os.fspath(given)):
        raise RequestError(f"ngram_table is {path!r}, expected a path.")
    tokenizer = manifest.files[TOKENIZER].sha256
    if path is not None and Path(path).exists():
        return NgramTable.load(Path(path), tokenizer, manifest.vocab_size)
    return NgramTable(tokenizer, manifest.vocab_size)
