"""The exception tree of edge-spec.

Every error a caller can cause derives from :class:`EdgeSpecError`, and every message says what was
given, what was expected and what to do about it.
"""

from __future__ import annotations


class EdgeSpecError(Exception):
    """Base of everything edge-spec raises on purpose."""


class BundleError(EdgeSpecError):
    """A pair bundle is missing, cut short, edited, newer than this reader, or cannot be written."""


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


class ProviderError(EdgeSpecError):
    """The execution provider that was asked for does not work on this machine."""


class MissingDependencyError(EdgeSpecError, ImportError):
    """An optional dependency is needed for what was asked; the message names the extra to install."""
