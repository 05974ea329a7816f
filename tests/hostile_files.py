"""Files as somebody with bad intentions, or a bad disk, would write them: sound ones, changed in places."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx

from edge_spec.bundle import MANIFEST
from edge_spec.export import export_pair
from edge_spec.export.gguf_checkpoint import GgufCheckpoint
from gguf_files import METADATA, model_metadata, model_tensors, tokenizer_metadata, write_model

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content | trim }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_ATOMS: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**18, 10**400, 0.5, -0.0,
    1e-300, 1e308, float("nan"), float("inf"), "", "a", "..", "../../../etc/passwd", "/dev/zero", "\x00", "\x1b[2J",
    "\ud800", "x" * 5000, "{{ 1 }}", [], {}, [[]], [0] * 1000, {"a": {"a": {"a": {}}}}, "(a+)+$", "[", "9" * 400,
]  # fmt: skip
_WORDS = [
    "{{",
    "{%",
    "%}",
    "}}",
    "for",
    "in",
    "if",
    "else",
    "endif",
    "endfor",
    "set",
    "macro",
    "endmacro",
    "call",
    "endcall",
    "filter",
    "endfilter",
    "block",
    "endblock",
    "namespace",
    "messages",
    "loop.index",
    "range(9)",
    "range(10**9)",
    "10**9",
    "**",
    "*",
    "~",
    "+",
    "%",
    "|",
    "trim",
    "upper",
    "join(',')",
    "tojson",
    "indent(9)",
    "center(10**8)",
    "list",
    "replace('a','bb')",
    "batch(9)",
    "round",
    "sort",
    "groupby('role')",
    "items",
    "'a'",
    '"b"',
    "1",
    "[",
    "]",
    "(",
    ")",
    "{",
    "}",
    ",",
    ":",
    ".",
    ".x",
    ".format(1)",
    "map",
    ".join([1])",
    ".ljust(10**9)",
    ".split()",
    "ns.x",
    "self",
    "cycler",
    "lipsum()",
    "is",
    "not",
    "none",
    "raise_exception('x')",
    "strftime_now('%Y')",
    "<!--",
    "\n",
    "-",
    "{#-",
    "-#}",
]


def sources(folder: Path) -> dict[str, Path]:
    """Write sound files of every kind into ``folder``: checkpoints, and bundles made of them."""
    metadata = {**METADATA, "tokenizer.chat_template": TEMPLATE}
    gguf = write_model(folder / "sound.gguf", metadata=metadata)
    other = write_model(
        folder / "qwen.gguf",
        metadata={**model_metadata("qwen2"), **tokenizer_metadata("qwen2", merges=("z z",))},
        tensors=model_tensors(qkv_bias=True),
    )
    found = {"gguf": gguf, "gguf qwen": other, "huggingface": _write_huggingface(folder / "huggingface", gguf)}
    for recipe, draft in (("fp32", None), ("w8a8", None), ("int4", gguf)):
        report = export_pair(gguf, draft, folder / f"{recipe}.pair", recipe=recipe, draft_recipe="fp16", check=False)
        found[f"bundle {recipe}"] = report.path
    return found


def _write_huggingface(folder: Path, gguf: Path) -> Path:
    from safetensors.numpy import save_file

    checkpoint = GgufCheckpoint(gguf)
    facts = checkpoint.architecture
    folder.mkdir()
    names = [name for name in _tensor_names() if name != "lm_head.weight"]
    save_file({f"model.{name}": checkpoint.tensor(name) for name in names}, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_size,
        "vocab_size": facts.logits_size,
        "max_position_embeddings": facts.context_length,
        "rms_norm_eps": facts.norm_epsilon,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        "tie_word_embeddings": True,
        "eos_token_id": [256],
    }  # fmt: skip
    index = {"weight_map": {f"model.{name}": "model.safetensors" for name in names}}
    generation = {"do_sample": True, "temperature": 0.7, "eos_token_id": 256}
    settings = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    for name, content in {
        "config.json": config,
        "generation_config.json": generation,
        "tokenizer_config.json": settings,
        "model.safetensors.index.json": index,
    }.items():
        (folder / name).write_text(json.dumps(content))
    checkpoint.vocabulary.tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _tensor_names() -> Iterator[str]:
    yield from ("embed_tokens.weight", "norm.weight")
    for name in ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        yield f"layers.0.{name}.weight"
    for name in "qkvo":
        yield f"layers.0.self_attn.{name}_proj.weight"


def seal(bundle: Path) -> None:
    """Make a manifest true again, as far as its digest and the other files' sizes and hashes go."""
    manifest = bundle / MANIFEST
    if manifest.is_symlink() or not manifest.is_file() or manifest.stat().st_size > 1 << 20:
        return
    try:
        body = json.loads(manifest.read_text())
    except ValueError:
        return
    for name, record in (body.get("files") or {}).items():
        file = bundle / name
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 1 << 26:
            record.update(bytes=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    write_manifest(bundle, body)


def write_manifest(bundle: Path, body: dict[str, Any]) -> None:
    """Write a manifest with the digest it ought to have."""
    body = {name: value for name, value in body.items() if name != "digest"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    (bundle / MANIFEST).write_text(json.dumps({**body, "digest": hashlib.sha256(canonical).hexdigest()}))


def changed_json(value: Any, random: Random) -> Any:
    """Return JSON with something else in one place."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        place, key = value, None
        while isinstance(place, dict | list) and place:
            parent, key = place, random.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
            place = parent[key]
            if random.random() < 0.15:
                break
        if key is None:
            return random.choice(_ATOMS)
        _change_entry(parent, key, random)
    return value


def _change_entry(parent: Any, key: Any, random: Random) -> None:
    old = parent[key]
    choice = random.randrange(7)
    if choice == 0:
        del parent[key]
    elif choice == 1 and isinstance(parent, dict):
        parent[random.choice(("extra", "..", "\x00", key + "x"))] = old
    elif choice == 2 and isinstance(old, int):
        parent[key] = random.choice((old + 1, old - 1, old * 2, -old, old << 32, old // 2))
    elif choice == 3 and isinstance(old, list):
        parent[key] = old * random.choice((2, 50)) if old and len(old) < 1000 else old
    elif choice == 4:
        nested: Any = old
        for _ in range(random.choice((3, 90, 400))):
            nested = [nested] if random.random() < 0.5 else {"a": nested}
        parent[key] = nested
    elif choice == 5 and isinstance(old, str):
        parent[key] = old[: random.randrange(len(old) + 1)] + random.choice(("", "\x00", "ÿ", "a" * 300, ".."))
    else:
        parent[key] = copy.deepcopy(random.choice(_ATOMS))


def changed_bytes(data: bytes, random: Random, region: int | None = None) -> bytes:
    """Return bytes with a few of them flipped, cut, moved or replaced by numbers that hurt."""
    edited = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5, 20))):
        end = min(region or len(edited), len(edited))
        if not end:
            break
        position, choice = random.randrange(end), random.randrange(6)
        if choice == 0:
            edited[position] ^= 1 << random.randrange(8)
        elif choice == 1:
            edited[position] = random.choice((0, 1, 127, 128, 255))
        elif choice == 2:
            number = random.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1))
            edited[position : position + 8] = struct.pack("<Q", number)
        elif choice == 3:
            del edited[position : position + random.choice((1, 4, 100))]
        elif choice == 4:
            start = random.randrange(end)
            edited[position:position] = edited[start : start + random.choice((1, 8, 200))]
        elif random.random() < 0.3:
            del edited[position:]
    return bytes(edited)


def random_template(random: Random) -> str:
    """A template: a sound one with words of the language thrown in, or nothing but those."""
    words = [random.choice(_WORDS) for _ in range(random.choice((1, 3, 10, 40)))]
    if random.random() < 0.5:
        return " ".join(words)
    if random.random() < 0.5:
        place = random.randrange(len(TEMPLATE))
        return TEMPLATE[:place] + " ".join(words[:4]) + TEMPLATE[place:]
    return changed_bytes(TEMPLATE.encode(), random).decode(errors="replace")


def changed_graph(model: onnx.ModelProto, random: Random) -> None:
    """Change one or two places of a graph that lie behind its syntax."""
    graph = model.graph
    for _ in range(random.choice((1, 1, 2))):
        node, tensor = random.choice(graph.node), random.choice(graph.initializer)
        choice = random.randrange(11)
        if choice == 0 and node.attribute:
            attribute = random.choice(node.attribute)
            attribute.i = random.choice((0, 1, -1, 2, 3, 4, 8, 16, 32, 128, 1 << 20, 2**40, 2**62, attribute.i * 2))
        elif choice == 1 and tensor.dims:
            index = random.randrange(len(tensor.dims))
            tensor.dims[index] = random.choice(
                (0, 1, -1, tensor.dims[index] * 2, tensor.dims[index] // 2, 2**40, 2**62)
            )
        elif choice == 2 and tensor.external_data:
            entry = random.choice(tensor.external_data)
            entry.value = random.choice(
                (
                    "0",
                    "-1",
                    "1",
                    str(2**62),
                    "/etc/passwd",
                    "../../secret",
                    "../manifest.json",
                    "model.onnx",
                    "",
                    "4096",
                )
            )
        elif choice == 3 and node.input:
            names = [value.name for value in graph.input] + [item.name for item in graph.initializer]
            names += [name for each in graph.node for name in each.output]
            node.input[random.randrange(len(node.input))] = random.choice(names)
        elif choice == 4:
            node.op_type = random.choice(
                ("If", "Loop", "Expand", "Tile", "ConstantOfShape", "Range", "MatMul", "Gather", "EinSum", node.op_type)
            )
        elif choice == 5:
            node.domain = random.choice(("", "com.microsoft", "ai.onnx.ml", "evil"))
        elif choice == 6:
            value = random.choice([*graph.input, *graph.output, *graph.value_info])
            if value.type.tensor_type.shape.dim:
                random.choice(value.type.tensor_type.shape.dim).dim_value = random.choice((0, 1, 2, -1, 2**40))
        elif choice == 7:
            tensor.data_type = random.choice((0, 1, 2, 3, 6, 7, 8, 10, 11, 16, 99))
        elif choice == 8:
            graph.node.insert(random.randrange(len(graph.node)), copy.deepcopy(node))
        elif choice == 9:
            # Consistent with itself: as many bytes as the shape says, and not as many as the node needs.
            if tensor.external_data and len(tensor.dims) > 1:
                axis = random.randrange(len(tensor.dims))
                length = next(entry for entry in tensor.external_data if entry.key == "length")
                new = max(1, tensor.dims[axis] // 2)
                length.value = str(int(length.value) // tensor.dims[axis] * new)
                tensor.dims[axis] = new
        elif choice == 10:
            graph.initializer.append(copy.deepcopy(tensor))


def changed_weights(file: Path, random: Random) -> None:
    """Put numbers that are none, or random bytes, somewhere into a file of weights."""
    data = bytearray(file.read_bytes())
    for _ in range(random.choice((1, 10, 100))):
        position = random.randrange(0, len(data) - 64) & ~3
        kind = random.choice((np.nan, np.inf, -np.inf, 3e38, 0.0, None))
        filler = random.randbytes(64) if kind is None else np.full(16, kind, np.float32).tobytes()
        data[position : position + 64] = filler
    file.write_bytes(data[: random.randrange(len(data))] if random.random() < 0.1 else data)


def changed_files(bundle: Path, random: Random) -> None:
    """Put something that is no plain file in the place of one."""
    names = [file.relative_to(bundle).as_posix() for file in bundle.rglob("*") if file.is_file()]
    file = bundle / random.choice(sorted(names))
    choice = random.randrange(7)
    if choice == 6 and (bundle / "target").is_dir():
        folder = bundle / "target"
        folder.rename(bundle.parent / "moved")
        folder.symlink_to(bundle.parent / "moved")
        return
    content = file.read_bytes()
    file.unlink()
    if choice == 0:
        os.mkfifo(file)
    elif choice == 1:
        file.symlink_to(random.choice(("/dev/zero", "/etc/passwd", "nowhere", "/proc/self/mem")))
    elif choice == 2:
        (bundle.parent / "outside").write_bytes(content)
        file.symlink_to(bundle.parent / "outside")
    elif choice == 3:
        file.mkdir()
    elif choice == 4:
        with file.open("wb") as sparse:
            sparse.truncate(random.choice((1 << 30, 1 << 40)))
    elif choice == 5:
        file.write_bytes(content * 2)


Change = Callable[[Path, Random], None]


def _json_file(name: str) -> Change:
    def change(folder: Path, random: Random) -> None:
        file = folder / name
        file.write_text(json.dumps(changed_json(json.loads(file.read_text()), random)))

    return change


def _byte_file(name: str, region: int | None = None) -> Change:
    def change(folder: Path, random: Random) -> None:
        file = folder / name if name else folder
        file.write_bytes(changed_bytes(file.read_bytes(), random, region))

    return change


def _manifest(bundle: Path, random: Random) -> None:
    body = changed_json(json.loads((bundle / MANIFEST).read_text()), random)
    if isinstance(body, dict):
        try:
            write_manifest(bundle, body)
        except (ValueError, RecursionError):
            (bundle / MANIFEST).write_text("{" * 1000)
    else:
        (bundle / MANIFEST).write_text(json.dumps(body))


def _graph(bundle: Path, random: Random) -> None:
    file = bundle / random.choice(("target", "draft")) / "model.onnx"
    file = file if file.exists() else bundle / "target" / "model.onnx"
    model = onnx.load(file, load_external_data=False)
    try:
        changed_graph(model, random)
        file.write_bytes(model.SerializeToString())
    except ValueError:  # a number that protobuf cannot write
        file.write_bytes(b"")


def _safetensors(folder: Path, random: Random) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(changed_json(json.loads(data[8 : 8 + length]), random)).encode()
    claimed = random.choice((len(header), len(header), len(header), 2**63, 0))
    file.write_bytes(claimed.to_bytes(8, "little") + header + data[8 + length :])


# By name: which sound file is changed, how, and whether it is a bundle to be sealed again.
CHANGES: dict[str, tuple[str, Change]] = {
    "manifest": ("bundle", _manifest),
    "graph bytes": ("bundle", _byte_file("target/model.onnx")),
    "graph fields": ("bundle", _graph),
    "tokenizer fields": ("bundle", _json_file("tokenizer.json")),
    "tokenizer bytes": ("bundle", _byte_file("tokenizer.json")),
    "weights": ("bundle", lambda bundle, random: changed_weights(bundle / "target" / "model.onnx.data", random)),
    "template": (
        "bundle", lambda bundle, random: (bundle / "chat_template.jinja").write_text(random_template(random)) and None
    ),
    "files": ("bundle", changed_files),
    "gguf header": ("gguf", _byte_file("", 12_000)),
    "gguf anywhere": ("gguf", _byte_file("")),
    "safetensors header": ("huggingface", _safetensors),
    "safetensors bytes": ("huggingface", _byte_file("model.safetensors", 3000)),
    "config": ("huggingface", _json_file("config.json")),
    "generation config": ("huggingface", _json_file("generation_config.json")),
    "tokenizer config": ("huggingface", _json_file("tokenizer_config.json")),
    "checkpoint tokenizer": ("huggingface", _json_file("tokenizer.json")),
    "index": ("huggingface", _json_file("model.safetensors.index.json")),
    "checkpoint files": ("huggingface", changed_files),
}  # fmt: skip


def write_hostile(kind: str, random: Random, sound: dict[str, Path], folder: Path) -> Path:
    """Write a changed copy of a sound file into ``folder`` and return its path."""
    wanted, change = CHANGES[kind]
    source = sound[random.choice(sorted(name for name in sound if name.split()[0] == wanted))]
    target = folder / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    change(target, random)
    if (wanted == "bundle" and kind not in ("manifest", "files")) or (kind == "files" and random.random() < 0.7):
        seal(target)
    return target
