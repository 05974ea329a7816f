"""The numeric check of an export: a fixed text through the written graph, compared with the float32 reference."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_spec.errors import QualityError
from edge_spec.export.recipe import Recipe
from edge_spec.manifest import QualityRecord

Float32Array = npt.NDArray[np.float32]

MAX_TOKENS = 160

# Prose, dialogue, numbers, code and other scripts: what a device is asked for, in little space.
TEXT = """The harbour was still dark when Ines unlocked the workshop. "You're early," said Tomas, pouring tea, \
"and the boat won't be here before 7:45." She laughed; in 1998 they had waited three hours for a single crate of \
valves. Today's list was shorter: 12 bearings, 4 seals and a pump rated for 250 litres per minute.

```python
def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)
```

Explain why the function checks its argument first. An empty list has length zero, so the division would fail with \
an error that says nothing about the cause. Die Antwort ist kurz: klare Fehler helfen. 你好，世界。"""


def compare(logits: Float32Array, reference: Float32Array) -> QualityRecord:
    """Measure how far ``logits`` stray from ``reference``, both float32 [tokens, vocab]."""
    log_p, log_q = _log_softmax(reference), _log_softmax(logits)
    divergence = np.sum(np.exp(log_p) * (log_p - log_q), axis=1)
    agreement = np.mean(logits.argmax(axis=1) == reference.argmax(axis=1))
    return QualityRecord(
        tokens=len(logits),
        mean_kl=float(divergence.mean()),
        p95_kl=float(np.quantile(divergence, 0.95)),
        top1_agreement=float(agreement),
    )


def require_quality(quality: QualityRecord, recipe: Recipe, source: str) -> None:
    """Raise QualityError if the export strays further from the reference than its recipe allows."""
    # Written so that a NaN fails as well.
    if not quality.mean_kl <= recipe.max_mean_kl:
        raise QualityError(
            f"{source} exported with recipe {recipe.name!r} strays too far from float32: mean KL {quality.mean_kl:.4g} "
            f"nats (allowed {recipe.max_mean_kl:g}), top-1 agreement {quality.top1_agreement:.1%} over "
            f"{quality.tokens} tokens. Use a finer recipe (int4-128 < int4 < w8a8 < fp16 < fp32); nothing was written."
        )


def _log_softmax(logits: Float32Array) -> npt.NDArray[np.float32]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)
