"""What is in a bundle, as text for a person: read from the manifest alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edge_spec.byte_size import size_text
from edge_spec.manifest import (
    CHAT_TEMPLATE,
    ArchitectureRecord,
    CacheType,
    FileRecord,
    HeadRecord,
    Manifest,
    ModelRecord,
)

_LABEL = 17
_CACHE_ITEM_BYTES: dict[CacheType, int] = {"float32": 4, "float16": 2, "int8": 1}


def describe_bundle(path: Path, manifest: Manifest) -> str:
    """Return sizes, recipes, quality and file hashes of the bundle at ``path``, a line each."""
    lines = [f"{path}: pair bundle for {manifest.device}, {size_text(_total(manifest))}, made by {manifest.created_by}"]
    lines += _fields(_vocabulary(manifest))
    lines += ["", f"target: {manifest.target.source}", *_fields(_model(manifest.target, manifest))]
    for device, draft in manifest.drafts.items():
        where = "" if device == manifest.device else f" on the {device.upper()}"
        lines += ["", f"draft{where}: {draft.source}"]
        lines += [*_fields(_model(draft, manifest)), *_fields(_speech(draft, manifest))]
    if not manifest.drafts:
        lines += ["", "draft: none"]
    if manifest.head is not None:
        lines += ["", f"head: {manifest.head.model.source}", *_fields(_head(manifest.head, manifest))]
    if manifest.head is not None and manifest.drafts:
        lines += ["", _choice(manifest)]
    lines += ["", "files:"]
    lines += _files(manifest.files)
    return "\n".join(map(printable, lines))


def printable(line: str) -> str:
    """Return a line without what would move the cursor or change the colours of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _vocabulary(manifest: Manifest) -> Iterator[tuple[str, str]]:
    ends = ", ".join(map(str, manifest.eos_token_ids)) or "none"
    start = "none" if manifest.bos_token_id is None else str(manifest.bos_token_id)
    yield (
        "vocabulary",
        f"{manifest.vocab_size:,} ids, {len(manifest.special_token_ids)} special; BOS {start}, EOS {ends}",
    )
    yield "context", f"{manifest.context_length:,} tokens"
    yield "chat template", "yes" if CHAT_TEMPLATE in manifest.files else "no"
    if manifest.default_sampling:
        yield "suggested", ", ".join(f"{name} {value:g}" for name, value in manifest.default_sampling.items())


def _model(model: ModelRecord, manifest: Manifest) -> Iterator[tuple[str, str]]:
    facts = model.architecture
    embeddings = "tied" if facts.tied_embeddings else "separate"
    sizes = f"{facts.layers} layers, hidden size {facts.hidden_size}, MLP {facts.intermediate_size}"
    heads = f"{facts.heads} heads of {facts.head_size} on {facts.kv_heads} KV heads"
    yield "architecture", f"{facts.family}: {sizes}"
    yield "attention", ", ".join([heads, *_positions(facts)])
    if facts.sliding_window is not None:
        yield "window", f"{facts.sliding_window:,} tokens in {facts.sliding_layers} layers"
    yield "embeddings", f"{embeddings}, {facts.readable_ids:,} rows"
    yield "recipe", _recipe(model)
    if "block_size" in model.recipe:
        yield "int4 blocks", f"{model.recipe['block_size']} weights each"
    stored = f", w8a8 ones as {model.integer_weights}" if model.integer_weights else ""
    folder = model.graphs[0].path.partition("/")[0]
    beside = 0 if manifest.head is None else _total(manifest, "target/head.")
    yield "weights", size_text(_total(manifest, f"{folder}/") - (beside if folder == "target" else 0)) + stored
    items = 2 * facts.layers * facts.kv_heads * facts.head_size
    types = dict.fromkeys(graph.kv for graph in model.graphs)
    caches = (f"{size_text(items * _CACHE_ITEM_BYTES[kv])} in {kv}" for kv in types)
    yield "KV cache", f"{' or '.join(caches)} per token"
    for graph in model.graphs:
        does = "verifies chains and trees" if graph.tree else "verifies chains"
        if graph.steps > 1:
            does = f"drafts {graph.steps} tokens a call"
        via = "" if graph.via == "native" else f", by way of {graph.via}"
        yield "graph", f"{graph.path}, {does}, KV cache in {graph.kv}{via}"
    yield "quality", _quality(model)
    yield "source SHA-256", model.source_sha256


def _head(head: HeadRecord, manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "design", head.kind
    behind = ", ".join(map(str, head.taps))
    yield "reads", f"the target's hidden states behind {behind} of its {manifest.target.architecture.layers} layers"
    proposed = f"{head.model.architecture.logits_size:,} of the target's ids" if head.names_columns else "any id"
    yield "proposes", f"{proposed}, {'a token' if head.tokens == 1 else f'{head.tokens} tokens'} a call"
    own = {"embeddings": None, "weights": size_text(_total(manifest, head.model.graphs[0].path))}
    own |= {"graph": f"{head.model.graphs[0].path}, beside the target's"}
    if head.kind == "medusa":
        own |= {"attention": None, "KV cache": None}
    for label, value in _model(head.model, manifest):
        told = own.get(label, value)
        if told is not None:
            yield label, told


def _choice(manifest: Manifest) -> str:
    """Which of head and draft model is loaded where memory is no matter."""
    from edge_spec.runtime.calibration_cache import kept_calibrations
    from edge_spec.runtime.memory import plan_memory
    from edge_spec.runtime.memory_table import describe_choice

    return describe_choice(plan_memory(manifest, None, kept=kept_calibrations(manifest)))


def _positions(facts: ArchitectureRecord) -> Iterator[str]:
    """Its rotary embeddings."""
    for rope in facts.ropes:
        scaling = " (scaled)" if rope.scaled else ""
        part = "" if rope.size == facts.head_size else f" on {rope.size} of each head"
        layers = "" if rope.layers == facts.layers else f" in {rope.layers} layers"
        yield f"RoPE base {rope.theta:g}{scaling}{part}{layers}"


def _speech(draft: ModelRecord, manifest: Manifest) -> Iterator[tuple[str, str]]:
    speech = manifest.draft_vocabulary
    if speech is None:
        yield "vocabulary", "the target's"
        return
    whose = "tokens of its own tokenizer" if speech.reads == "own tokens" else "of the target's ids"
    proposed = draft.architecture.logits_size if speech.names_columns else speech.size
    yield "vocabulary", f"reads {speech.size:,} {whose}, proposes {proposed:,} of them"


def _recipe(model: ModelRecord) -> str:
    stored = ((layer, form) for layer, form in model.recipe.items() if layer not in ("name", "block_size"))
    layers = ", ".join(f"{layer} {form}" for layer, form in stored)
    return f"{model.recipe.get('name', 'own')}: {layers}"


def _quality(model: ModelRecord) -> str:
    quality = model.quality
    if quality is None:
        return "not checked"
    return (
        f"KL to float32 {quality.mean_kl:.4f} mean, {quality.p95_kl:.4f} p95 nats; "
        f"same likeliest token {quality.top1_agreement:.1%} of {quality.tokens}"
    )


def _files(files: dict[str, FileRecord]) -> Iterator[str]:
    width = max(map(len, files), default=0)
    for name, record in sorted(files.items()):
        yield f"  {name:<{width}}  {size_text(record.bytes):>10}  {record.sha256}"


def _fields(pairs: Iterator[tuple[str, str]]) -> Iterator[str]:
    return (f"  {label:<{_LABEL}}{value}" for label, value in pairs)


def _total(manifest: Manifest, prefix: str = "") -> int:
    return sum(record.bytes for name, record in manifest.files.items() if name.startswith(prefix))
