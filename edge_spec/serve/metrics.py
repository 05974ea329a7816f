"""What Prometheus collects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edge_spec.serve.fair_queue import FairQueue
from edge_spec.serve.request_record import RequestRecord

_PREFIX = "edge_spec"
# What is served; anything else would let clients make up names without end.
_PATHS = frozenset(
    {
        "/",
        "/health",
        "/ready",
        "/status",
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
    }
)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160)
_SPEEDS = (0.5, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
_LENGTHS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class Metrics:
    """Counts requests and what they generated, in a registry of its own.

    Attributes:
        content_type: of what :meth:`text` returns.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, queue: FairQueue) -> None:
        """Count for a server with this queue."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "requests", "Requests by path and status", ["path", "status"], namespace=_PREFIX, registry=registry
        )
        self._gone = Counter(
            "clients_gone", "Requests whose client left before the end", namespace=_PREFIX, registry=registry
        )
        self._prompt_tokens = Counter(
            "prompt_tokens", "Prompt tokens by whether they were in a cache", ["cached"], _PREFIX, registry=registry
        )
        self._new_tokens = Counter(
            "generated_tokens", "Tokens by who proposed them", ["origin"], namespace=_PREFIX, registry=registry
        )
        self._drafted = Counter("drafted_tokens", "Draft tokens proposed", namespace=_PREFIX, registry=registry)
        self._accepted = Counter("accepted_tokens", "Draft tokens accepted", namespace=_PREFIX, registry=registry)
        self._rounds = Counter(
            "rounds",
            "Target calls by what the controller chose: with a draft, or plain",
            ["choice"],
            namespace=_PREFIX,
            registry=registry,
        )
        self._time = Counter(
            "engine_seconds", "Seconds of the engine by what for", ["part"], namespace=_PREFIX, registry=registry
        )
        self._ttft = Histogram(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token",
            namespace=_PREFIX,
            registry=registry,
            buckets=_SECONDS,
        )
        self._waiting = Histogram(
            "queue_seconds",
            "Seconds from a request's arrival to its turn",
            namespace=_PREFIX,
            registry=registry,
            buckets=_SECONDS,
        )
        self._speed = Histogram(
            "tokens_per_second", "Decoding speed of answers", namespace=_PREFIX, registry=registry, buckets=_SPEEDS
        )
        self._acceptance = Histogram(
            "acceptance_rate",
            "Share of an answer's draft tokens that were accepted",
            namespace=_PREFIX,
            registry=registry,
            buckets=_SHARES,
        )
        self._length = Histogram(
            "mean_accepted_length",
            "Tokens of an answer per target call",
            namespace=_PREFIX,
            registry=registry,
            buckets=_LENGTHS,
        )
        running = Gauge("requests_running", "Requests in the engine", namespace=_PREFIX, registry=registry)
        running.set_function(lambda: queue.running)
        waiting = Gauge("requests_waiting", "Requests in the queue", namespace=_PREFIX, registry=registry)
        waiting.set_function(lambda: queue.waiting)
        limit = Gauge("queue_limit", "Requests that may wait", namespace=_PREFIX, registry=registry)
        limit.set(queue.limit)
        self._memory = Gauge(
            "memory_bytes",
            "Memory: resident now, the plan's peak, the budget",
            ["kind"],
            namespace=_PREFIX,
            registry=registry,
        )

    def count(self, record: RequestRecord) -> None:
        """Count a request that is over."""
        path = record.path if record.path in _PATHS else "other"
        self._requests.labels(path, "gone" if record.status is None else str(record.status)).inc()
        if record.gone:
            self._gone.inc()
        if record.ttft_seconds is not None:
            self._ttft.observe(record.ttft_seconds)
        if record.waiting_seconds is not None:
            self._waiting.observe(record.waiting_seconds)
        for completion in record.completions:
            counts = completion.statistics
            self._prompt_tokens.labels("yes").inc(counts.reused_tokens)
            self._prompt_tokens.labels("no").inc(counts.prompt_tokens - counts.reused_tokens)
            for origin, tokens in counts.accepted_by_drafter.items():
                self._new_tokens.labels(origin).inc(tokens)
            self._new_tokens.labels("target").inc(counts.new_tokens - counts.accepted)
            self._drafted.inc(counts.drafted)
            self._accepted.inc(counts.accepted)
            self._rounds.labels("plain").inc(counts.plain_rounds)
            self._rounds.labels("drafted").inc(counts.rounds - counts.plain_rounds)
            for part in ("prefill", "draft", "verify", "overhead"):
                self._time.labels(part).inc(max(getattr(counts, f"{part}_seconds"), 0.0))
            if counts.tokens_per_second:
                self._speed.observe(counts.tokens_per_second)
            if counts.drafted:
                self._acceptance.observe(counts.acceptance_rate)
            if counts.rounds:
                self._length.observe(counts.mean_accepted_length)

    def text(self, memory: Mapping[str, Any]) -> bytes:
        """Return everything in Prometheus's text format.

        Args:
            memory: bytes by kind; ``None`` where there is no such number.
        """
        for kind, size in memory.items():
            if size is not None:
                self._memory.labels(kind).set(size)
        return generate_latest(self._registry)
