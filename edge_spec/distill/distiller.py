"""Makes a tiny draft for a target that has none: the target writes, the draft learns, and it is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from edge_spec.bundle import read_manifest
from edge_spec.distill.prompt_set import SELF_ASKED, PromptSet
from edge_spec.distill.prompt_source import PromptSource, listed
from edge_spec.distill.run_check import WantedTexts, check_run
from edge_spec.distill.tap_files import HEADER, TapFiles
from edge_spec.distill.tiny_files import read_draft_ids
from edge_spec.distill.train_progress import TrainProgress
from edge_spec.distill.train_settings import TrainSettings
from edge_spec.distill.trainer import TrainReport, train
from edge_spec.distill.verdict import Verdict, judge
from edge_spec.distill.work_folder import work_folder
from edge_spec.distill.write_texts import Written, write_texts
from edge_spec.errors import EdgeSpecError, RequestError
from edge_spec.export import add_draft, add_head
from edge_spec.export.progress import Progress, silent
from edge_spec.prompt_file import Opening, Question, read_questions

# Prompts that are kept back to measure with: of a user's own, this share; at most so many in any case.
_ASKED_SHARE = 0.1
_MOST_ASKED = 24

# One to learn from, one to measure what was learnt, and one to time in the end.
_LEAST_PROMPTS = 3

# Where the texts lie in the working folder; a draft has its kind's name.
TEXTS = "texts"


@dataclass(frozen=True)
class DistillReport:
    """What came of it.

    Attributes:
        bundle: the target with its new draft.
        written: the texts that were learned from.
        training: how that went.
        verdict: whether the draft pays; ``None`` if it was not measured.
    """

    bundle: Path
    written: Written
    training: TrainReport
    verdict: Verdict | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        files = self.written.files
        return {
            "bundle": str(self.bundle),
            "texts": {"folder": str(files.folder), "count": len(files), "answer_tokens": files.answer_tokens},
            "training": {**asdict(self.training), "folder": str(self.training.folder)},
            "verdict": None if self.verdict is None else self.verdict.to_dict(),
        }


def distill(
    bundle: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    settings: TrainSettings,
    *,
    target: str | os.PathLike[str] | None = None,
    prompts: str | os.PathLike[str] | None = None,
    tokens: int,
    limit_bytes: int,
    batch: int,
    output: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    measured: bool = True,
    progress: Progress = silent,
    told: Callable[[TrainProgress], None] = lambda report: None,
) -> DistillReport:
    """Train a draft for the target of a bundle, and add it to the bundle.

    What was done before a run was killed is found in its working folder, and the run goes on from there.

    Args:
        bundle: with the target as it will run.
        folder: working folder, for texts and weights.
        settings: what to train, and how.
        target: the target's checkpoint; ``None`` for the one that the bundle was made from.
        prompts: file of prompts, as for ``edge-spec bench --replay``; ``None`` for those that ship.
        tokens: of the target's answers to learn from.
        limit_bytes: most that the texts may take on disk.
        batch: texts that the target writes at a time.
        output: folder for the bundle with the draft; ``None`` adds it to the bundle in place.
        overwrite: replace another bundle that is already at ``output``, or the draft that another run has put into
            the bundle.
        threads: CPU threads; ``None`` for all.
        measured: whether to measure the draft at the end.
        progress: told how far each stage is.
        told: told how training goes.

    Raises:
        EdgeSpecError: something is missing, damaged or out of range.
    """
    work, path = Path(folder), Path(bundle)
    manifest = read_manifest(path)
    checkpoint = manifest.target.source if target is None else os.fspath(target)
    source, asked = _sources(None if prompts is None else Path(prompts), settings.seed)
    place = None if output is None else Path(output)
    wanted = WantedTexts(work / TEXTS, tokens, limit_bytes, len(source), prompts is None)
    check_run(path, manifest, checkpoint, work, place, overwrite, settings, threads, batch, wanted)
    with work_folder(work):
        written = write_texts(
            path,
            source,
            work / TEXTS,
            tokens=tokens,
            limit_bytes=limit_bytes,
            batch=batch,
            taps=_taps(work / TEXTS, settings),
            seed=settings.seed,
            threads=threads,
            progress=progress,
        )
        if written.full and len(written.files) < 2:
            raise wanted.no_room()
        draft = work / settings.kind
        training = train(written.files, checkpoint, draft, settings, told, threads)
        if settings.kind == "head":
            added = add_head(path, draft, output=output, target=target, overwrite=overwrite, progress=progress)
        else:
            # What rounding costs is part of what is measured, so it is not checked.
            added = add_draft(
                path,
                draft,
                output=output,
                draft_ids=read_draft_ids(draft),
                check=False,
                overwrite=overwrite,
                progress=progress,
            )
    finished = added.path
    verdict = None
    if measured:
        # The bundle may have a draft of the other kind too, and this is about the new one.
        loading: dict[str, Any] = {"drafter": "head" if settings.kind == "head" else "model"}
        if threads is not None:
            loading["threads"] = threads
        verdict = judge(
            finished, asked(len(written.files)), loading, lambda done, all_: progress("measuring", done, all_)
        )
    return DistillReport(finished, written, training, verdict)


def _taps(texts: Path, settings: TrainSettings) -> tuple[int, ...] | None:
    """What the texts are to be written with: no hidden states if nobody reads them, but any that are there already."""
    if settings.reads_taps:
        return None
    return TapFiles(texts).header.taps if (texts / HEADER).exists() else ()


def _sources(file: Path | None, seed: int) -> tuple[PromptSource, Callable[[int], list[Question]]]:
    """Prompts to learn from, and what gives those to measure with, once it is known how many were used."""
    if file is None:
        shipped = PromptSet(seed)
        return shipped, lambda used: _unused(shipped, used)
    questions = read_questions(file, recorded=True)
    count = min(max(1, round(len(questions) * _ASKED_SHARE)), _MOST_ASKED)
    if len(questions) < _LEAST_PROMPTS:
        raise RequestError(
            f"{file} holds {len(questions)} prompts, expected at least {_LEAST_PROMPTS}: one to learn from, one to "
            "measure what was learnt, and one to time in the end."
        )
    every = len(questions) // count
    kept = questions[::every][:count]
    asked = {question.line for question in kept}
    others = [question for question in questions if question.line not in asked]
    return listed(others, file), lambda used: kept


def _unused(shipped: PromptSet, used: int) -> list[Question]:
    """The last of the shipped prompts, as far as they are not among the first ``used``."""
    free = (number for number in reversed(range(used, len(shipped))) if shipped.kind(number) != SELF_ASKED)
    numbers = sorted(islice(free, _MOST_ASKED))
    if not numbers:
        raise EdgeSpecError("All of the shipped prompts were learned from, so none is left to measure with.")
    return [Question(number, str(number), shipped.kind(number), _asked(shipped, number)) for number in numbers]


def _asked(shipped: PromptSet, number: int) -> Opening:
    """The messages of a shipped prompt, with what stands in where no answer has been given yet."""
    return tuple(cast("Sequence[Mapping[str, Any]]", shipped.opening(number, lambda earlier: "")))
