"""Runs the graph of a recurrent head call by call, as the contract says, without the package's runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from edge_spec.bundle import open_bundle

CAPACITY = 64


class HeadGraph:
    """A head and its cache of so many rows; a smaller ``length`` takes rows back."""

    def __init__(self, bundle: Path) -> None:
        manifest = open_bundle(bundle).manifest
        assert manifest.head is not None
        self.record = manifest.head
        facts = self.record.model.architecture
        self.hidden, self.taps = facts.hidden_size, len(self.record.taps)
        self.session = ort.InferenceSession(
            str(bundle / self.record.model.graphs[0].path), providers=["CPUExecutionProvider"]
        )
        self.length = 0
        shape = (1, facts.kv_heads, CAPACITY, facts.head_size)
        self.cache = {f"past_key_values.0.{part}": np.full(shape, 9.0, np.float32) for part in ("key", "value")}

    def call(
        self, ids: list[int], taps: np.ndarray | None, features: np.ndarray | None = None, every: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read rows behind those in the cache; return their logits and features, or those of the last row alone."""
        taps = np.zeros((0, self.taps * self.hidden), np.float32) if taps is None else taps
        features = np.zeros((0, self.hidden), np.float32) if features is None else features
        assert len(ids) == len(taps) + len(features)
        rows = range(len(ids)) if every else [len(ids) - 1]
        logits, feature, *presents = self.session.run(
            ["logits", "feature", "present.0.key", "present.0.value"],
            {
                "input_ids": np.array([ids], np.int64),
                "taps": taps[None].astype(np.float32),
                "features": features[None].astype(np.float32),
                "seqlens_k": np.array([self.length + len(ids) - 1], np.int32),
                "total_sequence_length": np.array(self.length + len(ids), np.int32),
                "logit_rows": np.array(rows, np.int64),
                **self.cache,
            },
        )
        self.length += len(ids)
        self.cache = dict(zip(self.cache, presents, strict=True))
        return logits[0], feature[0]
