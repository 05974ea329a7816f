"""What the controller and the memory plan would make of a pair on a device that is not here. Nothing is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from edge_spec.errors import RequestError
from edge_spec.manifest import Manifest, ModelRecord
from edge_spec.runtime.cost_curve import CostCurve
from edge_spec.runtime.memory import plan_memory
from edge_spec.runtime.memory_budget import DEFAULT_SHARE
from edge_spec.runtime.memory_plan import MemoryPlan
from edge_spec.simulation.cost_law import Kernels, cost_curve
from edge_spec.simulation.device_class import DeviceClass, PublishedSpeed
from edge_spec.simulation.model_sizes import ModelSizes
from edge_spec.simulation.scripted_text import Scenario, ScriptedText
from edge_spec.simulation.virtual_decoding import VirtualRun, decode_virtually

# Said wherever a prediction is shown.
NOTICE = (
    "These are predictions, not measurements: computed from published figures and assumptions, for devices that "
    "edge-spec has not been run on."
)

# Tokens of an answer, and the texts of each kind.
DEFAULT_TOKENS = 256
_TEXTS = 4
# Of context: a prompt, and an answer with a token behind its first.
_LEAST_CONTEXT = 3
_SHOWN_ROWS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Task:
    """A kind of request.

    Attributes:
        name: for people.
        prompt: tokens of its prompt.
        hard, easy: texts with which drafting has the least and the most success.
    """

    name: str
    prompt: int
    hard: Scenario
    easy: Scenario


# The ranges are around what was measured with a draft model on a CPU (docs/simulation.md).
TASKS = (
    Task("open questions", 96, Scenario(0.50, 0.0), Scenario(0.65, 0.05)),
    Task("conversation, mathematics", 96, Scenario(0.60, 0.05), Scenario(0.75, 0.10)),
    Task("code", 96, Scenario(0.70, 0.05), Scenario(0.85, 0.15)),
    Task("summaries, retrieved texts", 512, Scenario(0.60, 0.40), Scenario(0.75, 0.80)),
    Task("nothing to gain", 96, Scenario(0.0, 0.0), Scenario(0.0, 0.0)),
)


@dataclass(frozen=True)
class Outlook:
    """What is predicted for texts of one kind.

    Attributes:
        speedup: time of plain decoding over that of speculation.
        tokens_per_second: with speculation.
        mean_accepted_length: tokens per call of the target, its own included.
        drafted: share of the rounds by how many tokens they propose.
    """

    speedup: float
    tokens_per_second: float
    mean_accepted_length: float
    drafted: Mapping[int, float]


@dataclass(frozen=True)
class TaskPrediction:
    """What is predicted for a task: with hard texts and dear rows, and with easy texts and cheap ones."""

    task: str
    low: Outlook
    high: Outlook


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a pair on a device.

    Attributes:
        device: what it was predicted for.
        kernels: how several rows are taken to be multiplied.
        plan: how the pair fits.
        published: what somebody has published of a model with the target's sizes, if anything.
        tokens_per_second: of plain decoding.
        memory_share: the part of the memory's peak that the target's steps reach.
        call_costs: a call of so many rows over one of a single row, with cheap and with dear rows.
        draft_share: a step of the draft model over one of the target; ``None`` without one.
        tasks: what speculation brings; none where the pair does not fit.
    """

    device: DeviceClass
    kernels: Kernels
    plan: MemoryPlan
    published: PublishedSpeed | None
    tokens_per_second: float
    memory_share: float
    call_costs: Mapping[int, tuple[float, float]]
    draft_share: float | None
    tasks: tuple[TaskPrediction, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        device = self.device
        return {
            "prediction": NOTICE,
            "device": {
                "name": device.name,
                "title": device.title,
                "memory_bytes": device.memory_bytes,
                "sources": list(device.sources),
                "notes": list(device.notes),
                "assumptions": list(device.assumptions),
            },
            "kernels": self.kernels,
            "plan": self.plan.to_json(),
            "published_tokens_per_second": None if self.published is None else self.published.tokens_per_second,
            "plain_tokens_per_second": self.tokens_per_second,
            "memory_share": self.memory_share,
            "call_costs": {str(rows): list(costs) for rows, costs in self.call_costs.items()},
            "draft_share": self.draft_share,
            "tasks": [asdict(task) for task in self.tasks],
        }


def on_cuda(manifest: Manifest) -> Manifest:
    """Return the manifest of the same pair exported for CUDA, draft and all; one that is for CUDA already as it is.

    Raises:
        RequestError: a graph was written by another exporter, which does not tell the sizes of its matrices.
    """
    if any(graph.via == "optimum" for model in manifest.models for graph in model.graphs):
        raise RequestError(
            "This bundle was made by way of optimum, and so does not tell the sizes of its matrices; give a pair that "
            "edge-spec exports itself."
        )
    # How fast the device's processor is, nobody says: a draft for it counts as one for the GPU.
    draft = manifest.draft or manifest.cpu_draft
    if manifest.device == "cuda" and draft is manifest.draft:
        return manifest if manifest.cpu_draft is None else replace(manifest, cpu_draft=None)
    # With these comes all that exporting needs.
    from edge_spec.export.planned_bundle import planned_graphs
    from edge_spec.export.recipe import DEFAULT_RECIPES, RECIPES

    def exported(model: ModelRecord, recipe: str) -> ModelRecord:
        graphs = planned_graphs("cuda", model is draft)
        return replace(model, recipe=RECIPES[recipe].to_dict(), integer_weights=None, graphs=graphs)

    target_recipe, draft_recipe = DEFAULT_RECIPES["cuda"]
    return replace(
        manifest,
        device="cuda",
        target=manifest.target if manifest.device == "cuda" else exported(manifest.target, target_recipe),
        draft=None if draft is None else exported(draft, draft_recipe),
        cpu_draft=None,
    )


def predict(
    manifest: Manifest,
    device: DeviceClass,
    kernels: Kernels = "batched",
    context: int | None = None,
    tokens: int = DEFAULT_TOKENS,
    seed: int = 0,
) -> Prediction:
    """Predict how a pair would do on a device.

    Args:
        manifest: of the pair, for whichever flavour.
        device: a class of devices.
        kernels: how its ONNX Runtime multiplies several rows by int4 weights.
        context: tokens of context that are insisted on.
        tokens: of an answer.
        seed: the same gives the same prediction.

    Raises:
        RequestError: an argument is out of range, or nothing can be said of this bundle.
    """
    if not 2 <= tokens <= 4096:
        raise RequestError(f"tokens is {tokens}, expected 2 to 4096.")
    if seed < 0:
        raise RequestError(f"seed is {seed}, expected 0 or more.")
    manifest = on_cuda(manifest)
    budget = int(DEFAULT_SHARE * (device.memory_bytes - device.system_bytes))
    plan = plan_memory(manifest, budget, context)
    if plan.configuration.context < _LEAST_CONTEXT:
        raise RequestError(f"context is {plan.configuration.context}, expected {_LEAST_CONTEXT} tokens or more.")
    draft = manifest.draft if plan.configuration.draft else None
    target_sizes = ModelSizes.of(manifest.target.architecture)
    cheap, dear = (cost_curve(manifest.target, device, kernels, share) for share in (device.cheap_row, device.dear_row))
    drafts = (
        []
        if draft is None
        else [cost_curve(draft, device, kernels, share) for share in (device.cheap_row, device.dear_row)]
    )
    plain = cheap.at(1, TASKS[0].prompt)

    def outlook(task: Task, scenario: Scenario, target: CostCurve) -> Outlook:
        length = min(task.prompt + tokens, plan.configuration.context)
        prompt = max(1, min(task.prompt, length // 2))
        runs = [
            decode_virtually(
                target,
                drafts[target is dear] if drafts else None,
                device.round_seconds,
                ScriptedText.write(scenario, prompt, length, seed + number),
                plan.configuration.widest,
            )
            for number in range(_TEXTS)
        ]
        return _pooled(runs)

    tasks = (
        TaskPrediction(task.name, outlook(task, task.hard, dear), outlook(task, task.easy, cheap)) for task in TASKS
    )
    return Prediction(
        device,
        kernels,
        plan,
        device.published_speed(target_sizes),
        1.0 / (plain + device.round_seconds),
        device.share_of(target_sizes),
        {rows: (_times(cheap, rows), _times(dear, rows)) for rows in _SHOWN_ROWS},
        None if draft is None else drafts[0].at(1, 0) / cheap.at(1, 0),
        tuple(tasks) if plan.fits else (),
    )


def _times(curve: CostCurve, rows: int) -> float:
    return curve.at(rows, 0) / curve.at(1, 0)


def _pooled(runs: list[VirtualRun]) -> Outlook:
    tokens, rounds = sum(run.tokens for run in runs), sum(run.rounds for run in runs)
    seconds = sum(run.seconds for run in runs)
    drafted = sum((run.drafted for run in runs), Counter[int]())
    return Outlook(
        sum(run.plain_seconds for run in runs) / seconds,
        tokens / seconds,
        tokens / rounds,
        {length: count / rounds for length, count in sorted(drafted.items())},
    )
