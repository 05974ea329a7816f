"""Opens the models of a bundle where they run, target, draft or head."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edge_spec.bundle import Bundle
from edge_spec.heap import give_back
from edge_spec.manifest import CacheType, HeadRecord, Manifest, ModelRecord
from edge_spec.runtime.block_head import BlockHead
from edge_spec.runtime.capturing import capture
from edge_spec.runtime.cuda_features import settings_for
from edge_spec.runtime.head_measurement import AnyHead
from edge_spec.runtime.head_model import HeadModel
from edge_spec.runtime.medusa_heads import MedusaHeads
from edge_spec.runtime.memory_profile import MemoryNotes
from edge_spec.runtime.model import Model
from edge_spec.runtime.provider import CPU_PROVIDER

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairOpener:
    """Opens models of a bundle, and notes what they take.

    Attributes:
        bundle: the validated bundle.
        providers: execution providers, the one that does the work first.
        threads: CPU threads; ``None`` for ONNX Runtime's choice.
        notes: what each of them takes.
        device_taken: tells the bytes that are taken of a GPU's own memory.
        arenas: most bytes of the arenas of ``"target"``, ``"draft"`` and ``"head"`` on a GPU; no limit where one is not
            named.
    """

    bundle: Bundle
    providers: Sequence[str]
    threads: int | None
    notes: MemoryNotes
    device_taken: Callable[[], int | None]
    arenas: Mapping[str, int]

    def model(
        self,
        record: ModelRecord,
        context: int,
        kv: CacheType,
        exact_rows: bool,
        fixed_rows: int | None = None,
        taps: Sequence[int] = (),
    ) -> Model:
        """Open one of the models; see :class:`Model`."""
        manifest = self.bundle.manifest
        # The rotary table ends one row behind the context, and padding rows need their place in it. Another exporter's
        # model ends with the context, and so one token earlier if calls have a padding row.
        own = record.graphs[0].via == "native"
        longest = record.architecture.context_length + 1 - (fixed_rows or (1 if own or not exact_rows else 2))
        on_gpu = manifest.device_of(record) == "cuda"
        runs_on = list(self.providers) if on_gpu or manifest.device == "cpu" else [CPU_PROVIDER]
        is_target = record is manifest.target
        settings = settings_for(runs_on, self.arenas.get("target" if is_target else "draft"))
        if not is_target:  # a draft writes chains
            settings = replace(settings, tree_graph=False)
        with self.notes.of(_part(record, manifest), self.device_taken if on_gpu else None):
            loaded = Model(
                self.bundle,
                record,
                runs_on,
                min(context, longest),
                exact_rows,
                self.threads,
                fixed_rows,
                kv,
                settings,
                taps,
            )
            give_back()
        capture(loaded, last_row=not is_target)
        if loaded.eager_reason is not None and loaded.eager_reason not in settings.lacks:
            _LOG.warning("some calls run without CUDA graphs: %s", loaded.eager_reason)
        return loaded

    def head(self, head: HeadRecord, context: int) -> AnyHead:
        """Open the head; see :class:`HeadModel`, :class:`MedusaHeads` and :class:`BlockHead`."""
        on_gpu = self.bundle.manifest.device_of(head.model) == "cuda"
        settings = settings_for(self.providers, self.arenas.get("head"))
        with self.notes.of("head_weights", self.device_taken if on_gpu else None):
            loaded: AnyHead
            if head.kind == "medusa":
                loaded = MedusaHeads(self.bundle, head, self.providers, self.threads, settings.options)
            elif head.kind in ("dflash", "dspark"):
                loaded = BlockHead(self.bundle, head, self.providers, context, self.threads, settings.options)
            else:
                loaded = HeadModel(self.bundle, head, self.providers, context, self.threads, settings=settings)
            give_back()
        return loaded


def _part(record: ModelRecord, manifest: Manifest) -> str:
    """By which name what loading a model takes is noted."""
    if record is manifest.target:
        return "target_weights"
    return "cpu_draft_weights" if record is manifest.cpu_draft else "draft_weights"
