"""What a manifest must say to make sense: sizes that fit each other, and that no file can lie about.

A manifest's digest shows that it was not damaged, not that it is honest: whoever can write one can sign it.
"""

from __future__ import annotations

import re

from edge_spec.manifest import (
    DRAFT_IDS,
    DRAFT_TOKENIZER,
    HEAD_IDS,
    HEAD_MARKOV,
    TOKENIZER,
    ArchitectureRecord,
    HeadRecord,
    Manifest,
    ModelRecord,
)
from edge_spec.record_json import shown, shown_list

# All limits are far above what this package can run, and far below what would hurt. In bytes:
LARGEST_MANIFEST = 4 << 20
LARGEST_TEXT = 1 << 20  # a chat template
LARGEST_TOKENIZER = 256 << 20
LARGEST_GRAPH = 4 << 20
LARGEST_BUNDLE = 256 << 30

# Of files, and of characters in a name or a token.
_MOST_FILES = 64
_LONGEST_TEXT = 4096
# Of the model, in one call of a graph that drafts.
_MOST_STEPS = 16
# Of a head: hidden states that it reads, and tokens that a call of it proposes.
_MOST_TAPS = 16
_MOST_HEAD_TOKENS = 64

# Of a head that drafts a block at once: rows of the block, and rank of a bias by the token before.
MOST_BLOCK = 64
MOST_MARKOV_RANK = 4096

# What layer classes can be stored as, and how many int4 weights can share a scale.
_MATRIX_FORMATS = ("fp32", "fp16", "w8a8", "int4")
_FORMATS = {
    "embedding": ("fp32", "fp16", "int8", "int4"),
    **dict.fromkeys(("attention", "mlp_up", "mlp_down", "lm_head"), _MATRIX_FORMATS),
}
_BLOCK_SIZES = (16, 32, 64, 128, 256)

# Of an architecture: beyond these no model is meant for a small machine.
LARGEST_SIZES = {
    "layers": 1024,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "heads": 1024,
    "kv_heads": 1024,
    "head_size": 4096,
    "logits_size": 1 << 22,
    "context_length": 1 << 24,
}
# Other characters mean something to a shell, a terminal or another operating system.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}){0,3}")


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError unless what the manifest says is possible, and every file the runtime opens is among its own."""
    _check_paths(manifest)
    if manifest.cpu_draft is not None and manifest.device == "cpu":
        raise ValueError("cpu_draft is for a target on CUDA, and this one is for the CPU")
    for record in manifest.models:
        _check_sizes(record.architecture)
        _check_recipe(record.recipe)
        _check_graphs(manifest, record)
    if manifest.head is not None:
        _check_head(manifest, manifest.head)
    _check_vocabulary("vocab_size", manifest.vocab_size, manifest.target.architecture)
    _check_draft_vocabulary(manifest)
    _require_between("vocab_size", manifest.vocab_size, 1, LARGEST_SIZES["logits_size"])
    _require_between("context_length", manifest.context_length, 2, manifest.target.architecture.context_length)
    ids = [*manifest.eos_token_ids, *manifest.special_token_ids]
    ids += [] if manifest.bos_token_id is None else [manifest.bos_token_id]
    for token in ids:
        _require_between("a token id", token, 0, manifest.vocab_size - 1)
    texts = [manifest.created_by, *(record.source for record in manifest.models)]
    texts += [] if manifest.head is None else [manifest.head.model.source]
    texts += [part for pair in manifest.named_tokens.items() for part in pair]
    if any(len(text) > _LONGEST_TEXT for text in texts):
        raise ValueError(f"a name is longer than {_LONGEST_TEXT} characters")


def _check_vocabulary(name: str, size: int, facts: ArchitectureRecord) -> None:
    """Raise ValueError unless a model can read so many ids and has a logit for each."""
    if size > facts.logits_size:
        raise ValueError(f"{name} is {size}, but there are {facts.logits_size} logits")
    if size > facts.readable_ids:
        raise ValueError(f"{name} is {size}, but the embedding has {facts.readable_ids} rows")


def _check_draft_vocabulary(manifest: Manifest) -> None:
    """Raise ValueError unless the draft can read what it is given and what it says is about its own logits."""
    drafts = tuple(manifest.drafts.values())
    if not drafts and manifest.draft_vocabulary is not None:
        raise ValueError("draft_vocabulary is about a draft, and there is none")
    for draft in drafts:
        _check_speech(manifest, draft.architecture)


def _check_speech(manifest: Manifest, facts: ArchitectureRecord) -> None:
    speech = manifest.draft_vocabulary
    if speech is None:
        _check_vocabulary("vocab_size", manifest.vocab_size, facts)
        return
    _require_between("draft_vocabulary.size", speech.size, 1, facts.readable_ids)
    if speech.reads == "target ids" and speech.size != manifest.vocab_size:
        raise ValueError(f"draft_vocabulary.size is {speech.size}, but the target has {manifest.vocab_size} ids")
    if not speech.names_columns:
        _check_vocabulary("draft_vocabulary.size", speech.size, facts)
    needed = [DRAFT_TOKENIZER] if speech.reads == "own tokens" else []
    needed += [DRAFT_IDS] if speech.names_columns else []
    if missing := [name for name in needed if name not in manifest.files]:
        raise ValueError(f"files lacks {shown_list(missing)}")
    if speech.names_columns and manifest.files[DRAFT_IDS].bytes != 4 * facts.logits_size:
        raise ValueError(
            f"{DRAFT_IDS} has {manifest.files[DRAFT_IDS].bytes} bytes, expected 4 for each of "
            f"{facts.logits_size} logits"
        )


def _check_head(manifest: Manifest, head: HeadRecord) -> None:
    """Raise ValueError unless a head can read what the target tells and what it says is about its own logits."""
    facts, target = head.model.architecture, manifest.target
    _check_sizes(facts)
    _check_recipe(head.model.recipe)
    _require_between("tokens of the head", head.tokens, 1, _MOST_HEAD_TOKENS)
    if facts.hidden_size != target.architecture.hidden_size:
        raise ValueError(f"the head is {facts.hidden_size} wide, but the target {target.architecture.hidden_size}")
    if not 1 <= len(head.taps) <= _MOST_TAPS or list(head.taps) != sorted(set(head.taps)):
        raise ValueError(f"the taps of the head are {head.taps}, expected ascending numbers of layers")
    for graph in target.graphs:
        if not set(head.taps) <= set(graph.taps):
            raise ValueError(f"the head reads {head.taps}, but {graph.path} tells {graph.taps}")
    if len(head.model.graphs) != 1:
        raise ValueError(f"the head has {len(head.model.graphs)} graphs, expected one")
    (graph,) = head.model.graphs
    own = "float32" if manifest.device == "cpu" else "float16"
    if graph.tree or graph.kv != own or graph.taps or graph.via != "native" or graph.selects or graph.steps != 1:
        raise ValueError(f"{graph.path} is said to be what no graph of a head is")
    if graph.path.rpartition("/")[0] != target.graphs[0].path.rpartition("/")[0] or graph.path in (
        other.path for other in target.graphs
    ):
        raise ValueError(f"{graph.path} is no graph of its own beside the target's")
    if facts.readable_ids < manifest.vocab_size:
        raise ValueError(f"vocab_size is {manifest.vocab_size}, but the head's embedding has {facts.readable_ids} rows")
    if not head.names_columns and facts.logits_size < manifest.vocab_size:
        raise ValueError(f"vocab_size is {manifest.vocab_size}, but the head has {facts.logits_size} logits")
    if head.names_columns and facts.logits_size > manifest.vocab_size:
        raise ValueError(f"the head names {facts.logits_size} ids, but the target has {manifest.vocab_size}")
    if head.names_columns and manifest.files[HEAD_IDS].bytes != 4 * facts.logits_size:
        raise ValueError(
            f"{HEAD_IDS} has {manifest.files[HEAD_IDS].bytes} bytes, expected 4 for each of {facts.logits_size} logits"
        )
    _check_kind(manifest, head)


def _check_kind(manifest: Manifest, head: HeadRecord) -> None:
    """Raise ValueError unless a head reads, proposes and is given what heads of its kind are."""
    facts, target = head.model.architecture, manifest.target.architecture
    if head.kind in ("mtp", "medusa") and head.taps != (target.layers,):
        raise ValueError(f"a {head.kind} head reads what is behind layer {target.layers}, and this one {head.taps}")
    if head.kind in ("eagle3", "mtp") and head.tokens != 1:
        raise ValueError(f"a {head.kind} head is said to propose {head.tokens} tokens a call, expected 1")
    if head.kind in ("dflash", "dspark"):
        _require_between("rows of the head's block", head.block_size, 2, MOST_BLOCK)
        if head.names_columns or facts.logits_size != target.logits_size:
            raise ValueError(f"the logits of a {head.kind} head are the target's")
    if head.kind != "dspark" and (head.markov_rank or head.confidence):
        raise ValueError(f"a {head.kind} head has neither a Markov head nor one for confidence")
    _require_between("markov_rank", head.markov_rank, 0, MOST_MARKOV_RANK)
    if head.markov_rank:
        expected = 2 * head.markov_rank * (2 * facts.logits_size + 1)
        record = manifest.files.get(HEAD_MARKOV)
        if record is None or record.bytes != expected:
            found = "missing" if record is None else f"{record.bytes} bytes long"
            raise ValueError(f"{HEAD_MARKOV} is {found}, expected {expected} bytes")


def _check_paths(manifest: Manifest) -> None:
    """Raise ValueError unless files lie inside the bundle and everything the runtime opens is among them."""
    if len(manifest.files) > _MOST_FILES:
        raise ValueError(f"files names {len(manifest.files)} files, expected at most {_MOST_FILES}")
    for name, record in manifest.files.items():
        if not _PLAIN_NAME.fullmatch(name):
            raise ValueError(f"files names {shown(name)}, which is not a plain path inside the bundle")
        if not re.fullmatch("[0-9a-f]{64}", record.sha256):
            raise ValueError(f"the SHA-256 of {name} is {shown(record.sha256)}, expected 64 hexadecimal digits")
        limit = _largest(name)
        if not 0 <= record.bytes <= limit:
            raise ValueError(f"{name} is said to have {record.bytes} bytes, expected 0 to {limit}")
    models = manifest.models if manifest.head is None else (*manifest.models, manifest.head.model)
    needed = [TOKENIZER, *(graph.path for record in models for graph in record.graphs)]
    needed += [HEAD_IDS] if manifest.head is not None and manifest.head.names_columns else []
    if missing := [name for name in needed if name not in manifest.files]:
        raise ValueError(f"files lacks {shown_list(missing)}")
    if not all(any(graph.steps == 1 for graph in record.graphs) for record in models):
        raise ValueError("a model has no graphs")
    if any(len(graph.path.split("/")) != 2 or not graph.path.endswith(".onnx") for r in models for graph in r.graphs):
        raise ValueError("a graph is not called FOLDER/NAME.onnx")
    if (total := sum(record.bytes for record in manifest.files.values())) > LARGEST_BUNDLE:
        raise ValueError(f"the files are said to have {total} bytes, expected at most {LARGEST_BUNDLE}")


def _check_graphs(manifest: Manifest, record: ModelRecord) -> None:
    """Raise ValueError unless a model's graphs are such as are written for its device, each of them once."""
    own = "float32" if manifest.device_of(record) == "cpu" else "float16"
    seen: set[str | int] = set()
    for graph in record.graphs:
        _require_between(f"steps of {graph.path}", graph.steps, 1, _MOST_STEPS)
        if graph.kv not in (own, "int8"):
            raise ValueError(f"{graph.path} is said to have keys and values in {graph.kv}, expected {own} or int8")
        drafts = graph.steps > 1
        if drafts and (record is manifest.target or graph.tree or graph.kv == "int8" or graph.via != "native"):
            raise ValueError(f"{graph.path} is said to draft {graph.steps} tokens, which graphs of its kind cannot")
        if graph.taps and (record is not manifest.target or graph.via != "native"):
            raise ValueError(f"{graph.path} is said to tell hidden states, which graphs of its kind do not")
        if list(graph.taps) != sorted(set(graph.taps)) or any(
            not 1 <= tap <= record.architecture.layers for tap in graph.taps
        ):
            raise ValueError(f"the taps of {graph.path} are {graph.taps}, expected ascending numbers of layers")
        names: set[str | int] = {graph.path, graph.steps} if drafts else {graph.path}
        if names & seen:
            again = f"is one of several that draft {graph.steps} tokens" if graph.path not in seen else "is named twice"
            raise ValueError(f"{graph.path} {again}")
        seen |= names


def _check_recipe(recipe: dict[str, str | int]) -> None:
    """Raise ValueError unless a recipe tells what every layer class is stored as."""
    for layer_class, formats in _FORMATS.items():
        if recipe.get(layer_class) not in formats:
            raise ValueError(
                f"recipe stores {layer_class} as {shown(recipe.get(layer_class))}, expected one of {', '.join(formats)}"
            )
    if recipe.get("block_size", 32) not in _BLOCK_SIZES:
        sizes = ", ".join(map(str, _BLOCK_SIZES))
        raise ValueError(f"recipe has int4 blocks of {shown(recipe['block_size'])}, expected one of {sizes}")
    if not isinstance(recipe.get("name"), str):
        raise ValueError(f"recipe has the name {shown(recipe.get('name'))}, expected a text")


def _largest(name: str) -> int:
    if name.endswith(".onnx"):
        return LARGEST_GRAPH
    if name.endswith(".json"):
        return LARGEST_TOKENIZER
    return LARGEST_BUNDLE if "/" in name else LARGEST_TEXT


def _check_sizes(facts: ArchitectureRecord) -> None:
    for name, largest in LARGEST_SIZES.items():
        smallest = 2 if name == "context_length" else 1  # a token to read, and the one behind it
        _require_between(name, getattr(facts, name), smallest, largest)
    _require_between("embedding_rows", facts.readable_ids, 1, LARGEST_SIZES["logits_size"])
    if facts.heads % facts.kv_heads:
        raise ValueError(f"{facts.heads} attention heads cannot share {facts.kv_heads} key-value heads")
    for rope in facts.ropes:
        _require_between("size of a rotary embedding", rope.size, 2, facts.head_size)
        if rope.size % 2:
            raise ValueError(f"{rope.size} elements of a head cannot be rotated")
        _require_between("layers of a rotary embedding", rope.layers, 1, facts.layers)
    if sum(rope.layers for rope in facts.ropes) > facts.layers:
        raise ValueError(f"rotary embeddings are said to have more than {facts.layers} layers")
    _require_between("sliding_layers", facts.sliding_layers, 0, facts.layers)
    if facts.sliding_window is not None:
        _require_between("sliding_window", facts.sliding_window, 1, LARGEST_SIZES["context_length"])


def _require_between(name: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise ValueError(f"{name} is {shown(value)}, expected {smallest} to {largest}")
