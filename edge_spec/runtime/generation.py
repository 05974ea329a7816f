"""One generation from its prompt to its completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.runtime.logprobs import TokenLogprobs
from edge_spec.runtime.loop import Round, decode, prefill
from edge_spec.runtime.model import PREFILL_ROWS, Model
from edge_spec.runtime.output import Output
from edge_spec.runtime.request import Request
from edge_spec.runtime.statistics import Statistics

# What an iterator that has nothing more to read answers.
_READ = object()


def generate(
    target: Model,
    request: Request,
    output: Output,
    statistics: Statistics,
    between_rounds: Callable[[], None],
    on_call: Callable[[int, int, float], None],
    clock: Callable[[], float],
) -> Iterator[Chunk | None]:
    """Continue a request's text until it ends.

    Every step is one target call: a chunk of text read, for which ``None`` is yielded, or a round, for which a chunk
    is; the last one has the completion. The text, ``request.context.tokens``, then holds the prompt and what was
    emitted. Between two steps the target may work on other texts, and this one's cache may even be emptied: what is
    missing is read again.

    Args:
        target: at every step its cache is that of this text, and holds the beginning of it, possibly nothing.
        request: what to generate.
        output: where the tokens go, which decides where the text ends.
        statistics: counted into.
        between_rounds: called before each round.
        on_call: told rows, cached tokens and seconds of every call of the target whose rows all have logits.
        clock: tells the time, in seconds.

    Raises:
        LogitsError: a step leaves no token to choose.
    """
    context = request.context
    prompt_length = len(context.tokens)
    logprobs: list[TokenLogprobs] = []
    length = prompt_length + output.limit
    rounds = decode(target, request.speculation, context, request.rule, length, request.defer, on_call, clock)
    while True:
        held_back = output.poll()
        # The first round carries the end of the prompt; the others just the last token, since they may be trees.
        reading = prefill(target, context, PREFILL_ROWS if statistics.rounds == 0 else 1)
        while output.finish_reason is None and _timed(reading, statistics, clock):
            yield None
            held_back += output.poll()
        chunk = Chunk(held_back, (), ())
        if output.finish_reason is None:
            between_rounds()
            round_ = next(rounds)
            pieces, emitted = output.push(round_.tokens)
            statistics.record(round_, len(emitted))
            chunk = _chunk(pieces, emitted, round_)
            logprobs.extend(chunk.logprobs or ())
        if output.finish_reason is not None:
            break
        yield chunk
    # What lies behind the end of the text is nobody's past.
    context.history.rollback(prompt_length + len(output.token_ids))
    completion = Completion(
        output.text,
        tuple(output.token_ids),
        output.finish_reason,
        statistics,
        None if context.sampling.logprobs is None else tuple(logprobs),
    )
    yield replace(chunk, completion=completion)


def _timed(reading: Iterator[None], statistics: Statistics, clock: Callable[[], float]) -> bool:
    """Read a chunk of the text, if any is left to be read before the next round."""
    started = clock()
    is_left = next(reading, _READ) is not _READ
    statistics.record_prefill(clock() - started)
    return is_left


def _chunk(pieces: tuple[str, ...], emitted: tuple[int, ...], round_: Round) -> Chunk:
    """Describe what a round added: of its tokens only those that were emitted."""
    logprobs = None if round_.logprobs is None else round_.logprobs[: len(emitted)]
    return Chunk(
        "".join(pieces), emitted, round_.origins[: len(emitted)], logprobs=logprobs, pieces=pieces[: len(emitted)]
    )
