"""Hugging Face checkpoints: a folder of config.json, safetensors and tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from edge_spec.errors import CheckpointError, UnsupportedError
from edge_spec.export.checkpoint import Vocabulary, weights_sha256
from edge_spec.export.metadata import Metadata
from edge_spec.export.safetensors_file import SafetensorsFile
from edge_spec.manifest_check import LARGEST_TEXT, LARGEST_TOKENIZER
from edge_spec.plain_file import NotPlainError, open_regular
from edge_spec.tokenizer_check import check_tokenizer, panics_as_errors, reason

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_JSON = 64 << 20  # bytes; the index of a large checkpoint has some megabytes
# The bare name is that of a checkpoint saved without its head; the others those of a model that also sees pictures.
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}


class HuggingFaceFolder:
    """The parts of a checkpoint's folder that do not depend on its architecture.

    Attributes:
        config: config.json.
        default_sampling: the checkpoint's own suggestion.
    """

    def __init__(self, folder: Path) -> None:
        """Read the configuration. Weights are opened when they are asked for: only safetensors, no pickle.

        Raises:
            CheckpointError: a file is missing, damaged or cut short.
        """
        self._folder = folder
        self.config = read_json(folder / "config.json")
        self._generation = read_json(folder / "generation_config.json", required=False)
        # Without do_sample the recommendation is to decode greedily, whatever the other values are.
        samples = self._generation.flag("do_sample", False)
        self.default_sampling: Mapping[str, float] = self._generation.numbers(_SAMPLING) if samples else {}

    @cached_property
    def shards(self) -> dict[str, SafetensorsFile]:
        """The file of every tensor, by the tensor's name in there. Raises CheckpointError if one is damaged."""
        return _open_shards(self._folder)

    def vocabulary(self, embedding_rows: int) -> Vocabulary:
        """Read the tokenizer and what belongs to it, as :attr:`HuggingFaceCheckpoint.vocabulary` does."""
        return _read_vocabulary(self._folder, self.config, self._generation, embedding_rows)

    def sha256(self) -> str:
        """Return the hex digest of the weight files' contents, in the order of their names."""
        return weights_sha256(*sorted({shard.path for shard in self.shards.values()}))


def _read(path: Path, limit: int) -> bytes:
    """Read a file of a checkpoint's folder. Raises CheckpointError if it is too long, or no file of that folder."""
    try:
        with open_regular(path, path.parent) as file:
            content = file.read(limit + 1)
    except NotPlainError as error:
        raise CheckpointError(f"{error}; a checkpoint's folder must hold its files") from None
    if len(content) > limit:
        raise CheckpointError(f"{path} is longer than {limit:,} bytes; download it again")
    return content


def read_json(path: Path, *, required: bool = True) -> Metadata:
    """Return the object in a JSON file; an absent one is empty unless it is required."""
    try:
        values = json.loads(_read(path, _LARGEST_JSON).decode())
    except FileNotFoundError:
        if required:
            raise CheckpointError(f"{path} is missing; a Hugging Face checkpoint needs it") from None
        values = {}
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return Metadata(values, str(path))


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    """Return the shard of every tensor, by the tensor's name in there."""
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX)
        places = index.get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise CheckpointError(f"{index.where} holds no weight_map from tensors to files; download it again")
        shards = {}
        for file in sorted(set(places.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{index.where} names the shard {file!r} outside its folder")
            if not (folder / file).is_file():
                raise CheckpointError(f"{index.where} names the shard {file!r}, which is missing; download it again")
            shards[file] = SafetensorsFile(folder / file)
        for name, file in places.items():
            if name not in shards[file].tensors:
                raise CheckpointError(f"{shards[file].path} lacks tensor {name!r}, which {_INDEX} places there")
        return {name: shards[file] for name, file in places.items()}
    if (folder / _WEIGHTS).is_file():
        shard = SafetensorsFile(folder / _WEIGHTS)
        return dict.fromkeys(shard.tensors, shard)
    hint = ""
    if any(folder.glob("pytorch_model*.bin")):
        hint = "; it has PyTorch .bin weights: load and save it with transformers to convert them"
    raise CheckpointError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}{hint}")


def _read_vocabulary(folder: Path, config: Metadata, generation: Metadata, embedding_rows: int) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedError(
            f"{path} is missing; load the tokenizer with transformers (AutoTokenizer) and save it to write one"
        )
    text = _read(path, LARGEST_TOKENIZER)
    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_buffer(_within_the_embedding(text, embedding_rows))
            check_tokenizer(tokenizer)
    except Exception as error:  # the package raises nothing more specific
        raise CheckpointError(f"{path} is no tokenizer ({reason(error)}); download it again") from error
    # What training or a batch needed must not cut or pad a prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 0 < size <= embedding_rows:
        raise CheckpointError(f"{path} has {size} tokens, but the embedding has {embedding_rows} rows")
    settings = read_json(folder / "tokenizer_config.json", required=False)
    named = dict(_named_tokens(settings))
    ids = {name: tokenizer.token_to_id(text) for name, text in named.items()}
    ends = {*_token_ids(generation, "eos_token_id", size), *_token_ids(config, "eos_token_id", size)}
    if (eos := ids.get("eos_token")) is not None:
        ends.add(eos)
    bos = ids.get("bos_token")
    if bos is None:
        bos = next(iter(_token_ids(config, "bos_token_id", size)), None)
    special = (index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return Vocabulary(
        tokenizer=tokenizer,
        size=size,
        eos_token_ids=tuple(sorted(ends)),
        bos_token_id=bos,
        special_token_ids=tuple(sorted(special)),
        chat_template=_read_chat_template(folder, settings),
        named_tokens=named,
    )


def _within_the_embedding(text: bytes, rows: int) -> bytes:
    """A tokenizer.json without added tokens that the embedding has no row for, as for pictures in small Gemmas."""
    content = json.loads(text)
    added = content["added_tokens"]
    kept = [token for token in added if token["id"] < rows]
    return text if len(kept) == len(added) else json.dumps({**content, "added_tokens": kept}).encode()


def _token_ids(values: Metadata, key: str, size: int) -> list[int]:
    """Return the ids under a key that holds one id, a list of them, or nothing."""
    found = values.get(key)
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for index in ids:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
            raise CheckpointError(f"{values.where}: {key} names {index!r}, expected token ids from 0 to {size - 1}")
    return ids


def _named_tokens(settings: Metadata) -> Iterator[tuple[str, str]]:
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
                raise CheckpointError(f"{settings.where}: {name} holds half a character, expected text")
            yield name, text


def _read_chat_template(folder: Path, settings: Metadata) -> str | None:
    path = folder / "chat_template.jinja"
    try:
        return _read(path, LARGEST_TEXT).decode()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
