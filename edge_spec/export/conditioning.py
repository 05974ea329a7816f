"""Float32 weights made easier to round before they are packed: rotated, and rescaled by a calibration text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_spec.export.architecture import Architecture
from edge_spec.export.cache_scales import TEXT as OTHER_TEXT
from edge_spec.export.checkpoint import Checkpoint, encode_text
from edge_spec.export.decoder import DecoderLayer
from edge_spec.export.recipe import Recipe
from edge_spec.export.reference import Float32Reference
from edge_spec.export.rotation import Rotation, rotate_layer
from edge_spec.export.smoothing import LayerImportance, mean_square, smooth_layer

Float32Array = npt.NDArray[np.float32]

# A turn of chat with code, arithmetic and other languages. Not the text of the check, which is to be new to the model.
TEXT = """<|im_start|>user
How do I read a large file line by line in Python, and how much memory does it take?<|im_end|>
<|im_start|>assistant
Open the file and iterate over it. Only one line is in memory at a time:

```python
with open("log.txt", encoding="utf-8") as file:
    for number, line in enumerate(file, start=1):
        if "ERROR" in line:
            print(f"{number}: {line.rstrip()}")
```

If 3 workers paint a fence of 48 metres in 4 hours, how long do 5 take? The railway reached the valley in 1887 and \
brought coal, mail and, much later, tourists. Le musée est fermé le lundi, mais le jardin reste ouvert.<|im_end|>
"""

# More would hardly change the extremes that are looked for, and every token costs time.
_MOST_TOKENS = 256


def rotation_of(recipe: Recipe, facts: Architecture) -> Rotation | None:
    """The rotation of the residual stream of a model that is stored by a recipe; ``None`` if it is not rotated."""
    matrices = (recipe.attention, recipe.mlp_up, recipe.mlp_down, recipe.lm_head)
    # A norm of what a sublayer gives has gains in the stream's own channels, which a rotation would mix.
    return Rotation(facts.hidden_size) if "w8a8" in matrices and not facts.post_norms else None


class Conditioner:
    """Rewrites the weights of one model so that they compute the same and lose less when rounded by its recipe.

    With ``w8a8`` in the recipe the residual stream is rotated as a whole, if the family allows it, so every layer, the
    embedding and lm_head must pass through here. Blocks of int4 do not gain by that: each has its own scale, so
    outliers do little harm.
    """

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe) -> None:
        """Start the calibration text through the model."""
        facts = checkpoint.architecture
        self._facts, self._recipe = facts, recipe
        matrices = (recipe.attention, recipe.mlp_up, recipe.mlp_down, recipe.lm_head)
        self._rotation = rotation_of(recipe, facts)
        self._text: Float32Reference | None = None
        if {"w8a8", "int4"}.intersection(matrices):
            ids = encode_text(checkpoint.vocabulary, TEXT + OTHER_TEXT, checkpoint.source)
            embedded = [
                checkpoint.rows("embed_tokens.weight", token, token + 1)
                for token in map(int, ids[: min(_MOST_TOKENS, facts.context_length)])
            ]
            self._text = Float32Reference(facts, np.concatenate(embedded))

    def layer(self, layer: DecoderLayer) -> tuple[DecoderLayer, LayerImportance | None]:
        """Rewrite the next layer, whose arrays may change, and say how large the inputs of its matrices are."""
        if self._text is None:
            return layer, None
        inputs = self._text.run_layer(layer)
        if self._rotation is not None:
            layer, inputs = rotate_layer(layer, inputs, self._rotation)
        return layer, smooth_layer(layer, inputs, self._facts.kv_heads, self._facts.head_size, self._recipe)

    def final_norm(self, gain: Float32Array) -> Float32Array:
        """Return the gain the final norm is stored with, float32 [hidden]."""
        return gain if self._rotation is None else np.ones_like(gain)

    def head_importance(self, gain: Float32Array) -> Float32Array | None:
        """Mean square of each input of lm_head once all layers have passed, float32 [hidden]."""
        if self._text is None:
            return None
        if self._rotation is None:
            return mean_square(self._text.final_hidden(gain))
        return mean_square(self._rotation.rows(self._text.final_hidden(np.ones_like(gain))))

    def head_rows(self, rows: Float32Array, gain: Float32Array) -> Float32Array:
        """Rewrite rows of lm_head, float32 [rows, hidden], behind a norm that has ``gain`` in the checkpoint."""
        return rows if self._rotation is None else self._rotation.rows(rows, gain)

    def embedding_rows(self, rows: Float32Array) -> Float32Array:
        """Rewrite rows of the embedding, float32 [rows, hidden]."""
        return rows if self._rotation is None else self._rotation.rows(rows)
