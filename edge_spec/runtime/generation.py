"""One generation from its prompt to its completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from edge_spec.runtime.completion import Chunk, Completion
from edge_spec.runtime.logprobs import TokenLogprobs
from edge_spec.runtime.loop import Round, decode, prefill
from edge_spec.runtime.model import Model
from edge_spec.runtime.output import Output
from edge_spec.runtime.request import Request
from edge_spec.runtime.statistics import Statistics


def generate(
    target: Model,
    request: Request,
    output: Output,
    statistics: Statistics,
    between_rounds: Callable[[], None],
    on_call: Callable[[int, int, float], None],
    clock: Callable[[], float],
) -> Iterator[Chunk]:
    """Continue a request's text until it ends, yielding a chunk per target call; the last one has the completion.

    The text, ``request.context.tokens``, then holds the prompt and what was emitted.

    Args:
        target: its cache holds the beginning of the prompt, possibly nothing.
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
    started = clock()
    if output.finish_reason is None:
        prefill(target, context)
    statistics.record_prefill(clock() - started)
    length = prompt_length + output.limit
    rounds = decode(target, request.speculation, context, request.rule, length, request.defer, on_call, clock)
    while True:
        chunk = Chunk(output.poll(), (), ())
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


def _chunk(pieces: tuple[str, ...], emitted: tuple[int, ...], round_: Round) -> Chunk:
    """Describe what a round added: of its tokens only those that were emitted."""
    logprobs = None if round_.logprobs is None else round_.logprobs[: len(emitted)]
    return Chunk(
        "".join(pieces), emitted, round_.origins[: len(emitted)], logprobs=logprobs, pieces=pieces[: len(emitted)]
    )
