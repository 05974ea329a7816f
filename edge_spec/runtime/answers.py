"""Answers to requests, written in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edge_spec.heap import give_back
from edge_spec.runtime.cache_pool import CachedText, CachePool
from edge_spec.runtime.completion import Chunk
from edge_spec.runtime.drafter_pool import DrafterPool
from edge_spec.runtime.engine_statistics import Totals
from edge_spec.runtime.generation import generate
from edge_spec.runtime.model import Model
from edge_spec.runtime.output import Output
from edge_spec.runtime.pool_pressure import PoolPressure
from edge_spec.runtime.request import Request
from edge_spec.runtime.statistics import Statistics
from edge_spec.runtime.tokenizer import TextTokenizer
from edge_spec.runtime.turns import Turns


@dataclass(frozen=True)
class Answers:
    """What it takes to answer the requests to one engine.

    Attributes:
        target: the model whose text it is.
        tokenizer: decodes its tokens.
        eos_token_ids: tokens that end a text.
        drafters: who may draft.
        caches: the target's caches of all texts.
        turns: who may use all of these next.
        pressure: looks after the free memory between rounds.
        totals: told of every answer that has ended.
        exact: whether branches that were committed leave what plain decoding would have left.
        on_call: told rows, cached tokens and seconds of every call of the target whose rows all have logits.
        clock: tells the time, in seconds.
    """

    target: Model
    tokenizer: TextTokenizer
    eos_token_ids: Sequence[int]
    drafters: DrafterPool
    caches: CachePool
    turns: Turns
    pressure: PoolPressure
    totals: Totals
    exact: bool
    on_call: Callable[[int, int, float], None]
    clock: Callable[[], float]

    def answer(
        self,
        request: Request,
        session: CachedText | None,
        require_open: Callable[[], None],
        is_closed: Callable[[], bool],
    ) -> Iterator[Chunk]:
        """Generate, taking turns with all other answers; the last chunk has the completion.

        Args:
            request: what to generate.
            session: the text of the session that asks, if one does.
            require_open: called at the beginning of every turn; raises if the engine was closed.
            is_closed: asked while waiting for a turn.
        """
        context, clock = request.context, self.clock
        prompt_length = len(context.tokens)
        asked = clock()
        output = Output(
            self.tokenizer,
            context.sampling,
            self.eos_token_ids,
            room=self.target.context - prompt_length,
            cancelled=request.cancelled,
            started=asked,
            clock=clock,
        )
        statistics = Statistics(prompt_length, None if context.sampling.greedy else context.sampling.seed)
        length = prompt_length + output.limit

        def between_rounds() -> None:
            require_open()
            remaining = length - len(context.tokens)
            statistics.memory_events.extend(self.pressure.check(len(context.tokens), remaining))

        steps = generate(self.target, request, output, statistics, between_rounds, self.on_call, clock)
        ticket = self.turns.enter(self.target.cache.slots_for(length))
        text: CachedText | None = None
        chunk: Chunk | None = None
        try:
            while chunk is None or chunk.completion is None:
                asked = clock()
                with self.turns.turn(ticket, lambda: is_closed() or output.has_ended()) as admitted:
                    statistics.waiting_seconds += clock() - asked
                    require_open()
                    if admitted:
                        if text is None:
                            text = self.caches.begin(context.tokens, length, session)
                            statistics.reused_tokens = text.keep_common(context.tokens)
                        self.caches.use(text, length)
                        self.drafters.begin(context)
                    chunk = next(steps)
                    if admitted and chunk is not None and chunk.completion is not None:
                        self.drafters.end(context)
                if chunk is not None and chunk.completion is None:
                    yield chunk
            assert chunk.completion is not None  # that is how the loop ends
            self.totals.add(chunk.completion)
        finally:
            if text is not None:
                # Rows of branches that were committed are not what another division into calls would give.
                exact = request.defer or self.exact
                text.settle(context.tokens if exact else context.tokens[:prompt_length])
                self.caches.end(text)
            self.turns.leave(ticket)
            give_back()
        yield chunk  # whoever stops reading here leaves the engine free
