"""Loads a pair bundle."""

from __future__ import annotations

import os
from typing import Literal

from edge_spec.bundle import open_bundle
from edge_spec.errors import RequestError
from edge_spec.manifest import CacheType
from edge_spec.runtime.calibration import Calibration
from edge_spec.runtime.configuration import DrafterChoice
from edge_spec.runtime.draft_measurement import Progress
from edge_spec.runtime.engine import Engine
from edge_spec.runtime.exactness import Exactness
from edge_spec.runtime.memory_budget import MemoryBudget


def load(
    path: str | os.PathLike[str],
    device: str = "auto",
    memory_budget: MemoryBudget = None,
    context: int | None = None,
    conversations: int = 1,
    kv: CacheType | None = None,
    threads: int | None = None,
    exactness: Exactness | None = None,
    calibration: Calibration | Literal["fresh"] | None = None,
    progress: Progress | None = None,
    ngram_table: str | os.PathLike[str] | None = None,
    drafter: DrafterChoice = "auto",
) -> Engine:
    """Load a pair bundle.

    Args:
        path: the bundle's folder, as written by ``edge-spec export``.
        device: ``"auto"`` runs on what the bundle is for; ``"cpu"`` and ``"cuda"`` insist.
        memory_budget: most memory to take: ``"2GiB"``, bytes, or a share of what is free such as ``0.5``; by default
            80 % of what is free. What does not fit is given up in the order that ``edge-spec plan`` shows. On a GPU
            with memory of its own, it is about that.
        context: most tokens of prompt and output together, which are insisted on; by default 4096 or the model's limit,
            less if the budget is short.
        conversations: how many texts of that length should keep their cache at once, see :class:`edge_spec.Session`;
            fewer if the budget is short.
        kv: how the target's keys and values have to be stored: ``"float32"`` or ``"int8"`` (``"float16"`` on CUDA). By
            default as the model computes, or in int8 where a shorter context would be the other way out.
        threads: CPU threads, by default one per physical core.
        exactness: what is owed. ``"bitwise"``: speculation changes no bit; measured while loading, and where kernels
            depend on the width of a call, reached by giving every call the same. ``"distribution"``: the text follows
            the same law. By default bitwise where that holds by itself.
        calibration: what calls cost here; by default measured at the first load, which takes seconds, and remembered.
            ``"fresh"`` measures even what was measured before.
        progress: told what is being measured, and which share of it is done.
        ngram_table: a file written by :meth:`Engine.save_ngram_table`, from which drafting knows what was said before;
            need not exist.
        drafter: which one with a network of its own is loaded: ``"head"`` or ``"model"``, which are then insisted on,
            or ``"none"``; by default the one that is expected to gain more speed for its memory, as ``edge-spec plan``
            says.

    Raises:
        BundleError: the bundle is missing, damaged, written by another version's format, or made for another processor.
        ProviderError: ``device`` does not work here.
        MemoryBudgetError: the bundle does not fit its budget, however small the rest is made, or there was less memory
            than planned.
        MissingDependencyError: ONNX Runtime is not installed.
        RequestError: an argument is out of range, or there is not enough memory.
    """
    try:
        return Engine(
            open_bundle(path),
            device,
            memory_budget,
            context,
            conversations,
            kv,
            threads,
            exactness,
            calibration,
            progress,
            ngram_table,
            drafter,
        )
    except MemoryError as error:
        raise RequestError(f"There is not enough memory to load {path}; load it with a smaller context.") from error
