"""Which files of a repository on the hub are the checkpoint that is meant."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.hub_name import HubName

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# The weights of Medusa heads, which have a name of their own.
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"
# What belongs to a checkpoint of safetensors besides its weights, as far as a repository has it.
SMALL = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# In the name of a GGUF file the quantization stands between separators: model-Q4_K_M.gguf, model.q8_0.gguf.
_QUANTIZATION = re.compile(
    r"(?<![^-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|FP16|F32|FP32))(?![^-./])", re.IGNORECASE
)
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_NOT_A_MODEL = re.compile(r"(^|/)(mmproj|imatrix)[^/]*$", re.IGNORECASE)  # an image encoder, what quantizing needed


def require_safetensors(name: HubName, files: Iterable[str]) -> None:
    """Raise an error that says what there is instead, unless there is a checkpoint of safetensors.

    Args:
        name: what was asked for.
        files: names of what the repository holds.

    Raises:
        CheckpointError: there is none.
        UnsupportedError: its weights are in another format.
    """
    if CONFIG in files and any(weights in files for weights in (WEIGHTS, INDEX, MEDUSA_WEIGHTS)):
        return
    models = _models(files)
    if models:
        known = _by_quantization(models)
        one = f"{name.repository}:{next(iter(known))}" if known else f"{name.repository}/{models[0]}"
        has = f": it has {', '.join(known)}" if known else ""
        raise CheckpointError(f"{str(name)!r} holds GGUF files; name one of them, as in {one}{has}")
    if "medusa_lm_head.pt" in files:
        raise UnsupportedError(
            f"{str(name)!r} holds Medusa heads as medusa_lm_head.pt, a pickle, which could run anything when it is "
            f"read: convert it to {MEDUSA_WEIGHTS} where you trust it, put its config.json beside it, and give the "
            "folder"
        )
    if any(re.fullmatch(r"pytorch_model.*\.bin", file) for file in files):
        raise UnsupportedError(
            f"{str(name)!r} holds PyTorch .bin weights and no safetensors: load and save it with transformers to "
            "convert them, and give the folder"
        )
    raise CheckpointError(
        f"{str(name)!r} holds no checkpoint that can be exported: expected {CONFIG} with {WEIGHTS} or {INDEX}, or GGUF "
        "files"
    )


def shards(index: bytes) -> tuple[str, ...]:
    """Return the weight files that the content of an index names; none where it is damaged, as its reader will say."""
    try:
        places = json.loads(index)["weight_map"].values()
        return tuple(sorted({place for place in places if isinstance(place, str) and "/" not in place}))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()


def gguf_file(name: HubName, files: Iterable[str]) -> str:
    """Return the one GGUF file that is meant, by its name or its quantization.

    Raises:
        CheckpointError: there is no such file, or more than one.
        UnsupportedError: it is one part of a file that was split.
    """
    models = _models(files)
    if name.file is None:
        return _of_quantization(name, models)
    if name.file not in files:
        close = difflib.get_close_matches(name.file, models, 1, 0)
        raise CheckpointError(
            f"no file {name.file!r} in {_shown(name)}; "
            + (f"of its {len(models)} GGUF files the closest is {close[0]}" if close else "it has no GGUF files")
        )
    return _require_whole(name, name.file)


def _of_quantization(name: HubName, models: list[str]) -> str:
    wanted = (name.quantization or "").upper()
    known = _by_quantization(models)
    found = known.get(wanted, [])
    whole = [file for file in found if not _PART.search(file)]
    if not found:
        close = difflib.get_close_matches(wanted, known, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        has = f"it has {', '.join(known)}" if known else "it has no GGUF files that say theirs"
        raise CheckpointError(f"no GGUF file of quantization {name.quantization!r} in {_shown(name)}; {hint}{has}")
    if len(whole) > 1:
        raise CheckpointError(
            f"{len(whole)} GGUF files in {_shown(name)} are of quantization {name.quantization!r}; name one of them, "
            f"as in {name.repository}/{whole[0]}; the others: {', '.join(whole[1:])}"
        )
    return whole[0] if whole else _require_whole(name, found[0])


def _require_whole(name: HubName, file: str) -> str:
    if part := _PART.search(file):
        raise UnsupportedError(
            f"{file} of {_shown(name)} is one of {int(part[1])} parts, which cannot be read: fetch them and put them "
            "together with 'llama-gguf-split --merge', or take a quantization in one file, or the safetensors"
        )
    return file


def _models(files: Iterable[str]) -> list[str]:
    return sorted(file for file in files if file.endswith(".gguf") and not _NOT_A_MODEL.search(file))


def _by_quantization(models: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each quantization, by its name in capitals."""
    known: dict[str, list[str]] = {}
    for file in models:
        for quantization in {match[1].upper() for match in _QUANTIZATION.finditer(file.removesuffix(".gguf"))}:
            known.setdefault(quantization, []).append(file)
    return known


def _shown(name: HubName) -> str:
    return f"{name.repository}@{name.revision}" if name.revision else name.repository
