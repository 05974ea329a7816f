"""What a manifest says of a head's own network, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from edge_spec.export.recipe import Device, Recipe
from edge_spec.manifest import ArchitectureRecord, GraphRecord, ModelRecord
from edge_spec.processor import integer_products_saturate

# Where a head lies in a bundle.
GRAPH, WEIGHTS = "target/head.onnx", "target/head.onnx.data"


def head_model_record(
    source: str,
    sha256: str,
    architecture: ArchitectureRecord,
    recipe: Recipe,
    device: Device,
    shared: Mapping[str, str] | None = None,
) -> ModelRecord:
    """Describe it.

    Args:
        source: what the head is called.
        sha256: of its weights.
        architecture: its sizes.
        recipe: how it is stored.
        device: what its graph runs on.
        shared: formats of the layer classes that it has from the target.
    """
    integers: Literal["int8", "uint8"] | None = None
    if "w8a8" in recipe.formats.values():
        integers = "uint8" if integer_products_saturate() else "int8"
    return ModelRecord(
        source=source,
        source_sha256=sha256,
        architecture=architecture,
        recipe={**recipe.to_dict(), **(shared or {})},
        integer_weights=integers,
        graphs=(GraphRecord(GRAPH, False, "float32" if device == "cpu" else "float16"),),
        quality=None,
    )
