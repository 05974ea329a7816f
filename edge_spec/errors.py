"""The exception tree of edge-spec.

Every error a caller can cause derives from :class:`EdgeSpecError`, and every message says what was
given, what was expected and what to do about it.
"""

from __future__ import annotations

# Messages quote what files say, and files may say a lot.
_LONGEST_MESSAGE = 2000


class EdgeSpecError(Exception):
    """Base of everything edge-spec raises on purpose."""

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= _LONGEST_MESSAGE:
            return text
        half = _LONGEST_MESSAGE // 2
        return f"{text[:half]} ... {text[-half:]}"


class BundleError(EdgeSpecError):
    """A pair bundle is missing, cut short, edited, for an older or newer edge-spec, or cannot be written."""


class CheckpointError(EdgeSpecError):
    """A source checkpoint is missing, truncated or inconsistent."""


class UnsupportedError(CheckpointError):
    """A checkpoint is sound, but its architecture, tokenizer or quantization is not supported."""


class PairError(EdgeSpecError):
    """Target and draft do not belong together (different tokenizers)."""


class QualityError(EdgeSpecError):
    """An exported graph strays further from the float32 reference than its recipe allows."""


class RequestError(EdgeSpecError, ValueError):
    """A request is invalid: a sampling parameter, a token id, a prompt longer than the context."""


class PromptTooLongError(RequestError):
    """A prompt leaves no room for an answer in the context."""


class LogitsError(EdgeSpecError):
    """The logits of one step leave nothing to choose: they are not finite, or every token is excluded.

    Attributes:
        row: which row of the target's call it was. Row 0 follows the text itself. A later one follows draft tokens, so
            it is an error of the text only if those tokens are kept, and plain decoding may never have met it.
        position: absolute position in the sequence of the token that cannot be chosen; ``None`` if not known here.
    """

    def __init__(self, problem: str, row: int, position: int | None = None) -> None:
        """Say what is wrong, and where."""
        super().__init__(f"at {f'row {row}' if position is None else f'position {position}'}, {problem}")
        self.problem, self.row, self.position = problem, row, position

    def at(self, position: int) -> LogitsError:
        """Return the same error, naming the step by the position of its token."""
        return type(self)(self.problem, self.row, position)


class NoTokenLeftError(LogitsError, RequestError):
    """The request's masks, biases and processors exclude every token at one step."""


class GrammarLimitError(LogitsError, RequestError):
    """The request's grammar may go on in more ways at one step than can be told in reasonable time."""


class ProviderError(EdgeSpecError):
    """The execution provider that was asked for does not work on this machine."""


class MemoryBudgetError(EdgeSpecError):
    """A bundle does not fit its memory budget, however small the rest is made; the message holds the table."""


class DeviceMemoryError(MemoryBudgetError, ProviderError):
    """The device had no memory left for what the plan had counted on."""


class MissingDependencyError(EdgeSpecError, ImportError):
    """An optional dependency is needed for what was asked; the message names the extra to install."""
