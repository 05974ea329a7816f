"""The few shapes that calls are snapped to where CUDA graphs are captured, or where kernels round by their shape.

A captured graph repeats kernels with the sizes and addresses that they were launched with. So calls are snapped: their
rows to a few widths, and the length that attention is told to a few buckets of the context. How much of the cache
counts is still read from ``seqlens_k`` on the device, in every replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge_spec.runtime.call_shape import CallShape
from edge_spec.runtime.device_settings import DeviceSettings

# Rows of captured calls. Kernels cost little more for a padding row, but a step is most often one row or few.
_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
# Attention divides its work by the length it is told, so twice the true one is the most that is acceptable.
_SMALLEST_BUCKET = 256


@dataclass(frozen=True)
class ShapeGrid:
    """The shapes that calls are snapped to.

    Attributes:
        widths: rows of a call, ascending.
        buckets: total lengths, ascending; the last is the whole cache.
    """

    widths: tuple[int, ...]
    buckets: tuple[int, ...]

    @classmethod
    def of_context(cls, slots: int) -> ShapeGrid:
        """The usual grid for a cache of so many slots."""
        buckets = []
        bucket = _SMALLEST_BUCKET
        while 3 * bucket < 2 * slots:
            buckets.append(bucket)
            bucket *= 2
        return cls(tuple(width for width in _WIDTHS if width <= slots), (*buckets, slots))

    @classmethod
    def of_one_shape(cls, rows: int, slots: int) -> ShapeGrid:
        """The grid with one width and one bucket, so that kernels divide their work alike in every call.

        On CUDA attention is split by rows and by the length that it is told, and sums in another order if one of them
        changes.
        """
        return cls((rows,), (slots,))

    @classmethod
    def of_device(cls, settings: DeviceSettings, slots: int, fixed_rows: int | None) -> ShapeGrid | None:
        """The grid of a model with so many slots of cache; ``None`` if its calls are run as they come.

        Args:
            settings: how the device is used.
            slots: of the cache.
            fixed_rows: of every call; ``None`` where that goes by the tokens.
        """
        if not settings.resident:
            return None
        if fixed_rows is not None:
            return cls.of_one_shape(fixed_rows, slots)
        return cls.of_context(slots) if settings.captures else None

    def snap(self, rows: int, logit_rows: int, past: int) -> CallShape | None:
        """The shape of a call, at least as large.

        Args:
            rows: tokens of the call.
            logit_rows: rows whose logits are wanted.
            past: tokens in the cache.

        Returns:
            The shape; ``None`` if there is none, because the call is too wide or ends where padding has no slots.
        """
        width = next((width for width in self.widths if width >= rows), None)
        if width is None or past + width > self.buckets[-1]:
            return None
        total = next(bucket for bucket in self.buckets if bucket >= past + width)
        # Two kinds of calls ask for logits: of the last row, as a draft's steps, or of each, as a verification.
        wanted = logit_rows if logit_rows <= 1 and len(self.widths) > 1 else width if logit_rows else 0
        return CallShape(width, wanted, total)

    def bucket(self, length: int) -> int | None:
        """The total for so many tokens; ``None`` if there is none."""
        return next((bucket for bucket in self.buckets if bucket >= length), None)

    def shapes(self, last_row: bool) -> Iterator[CallShape]:
        """All shapes of calls with logits, those that are needed first before the others.

        Args:
            last_row: whether calls want the logits of one row only.
        """
        for total in self.buckets:
            for width in self.widths:
                if width <= total:
                    shape = self.snap(width, 1 if last_row else width, total - width)
                    assert shape is not None  # it is one itself
                    yield shape
