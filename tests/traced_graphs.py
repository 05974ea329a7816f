"""A small decoder's graph of the kind that optimum-onnx traces, made by hand, and bundles made of it.

So everything behind the tracing is tested where optimum-onnx is not installed: writing the graph anew, its check, and
the engine on top of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from edge_spec.bundle import new_bundle
from edge_spec.export.optimum_graph import GraphSizes, rewrite_graph
from edge_spec.export.recipe import RECIPES, Recipe
from edge_spec.export.weights import open_weight_file
from edge_spec.manifest import ArchitectureRecord, GraphRecord, Manifest, ModelRecord

LAYERS, HEADS, HEAD_SIZE, HIDDEN, CONTEXT = 2, 4, 8, 32, 160
LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
VOCAB = len(LETTERS) + 1  # and the end


class _Tracer:
    """Appends nodes, constants as nodes of their own, and weights as initializers, as a tracer does."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(seed)

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"/{kind}_{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        return str(self.op("Constant", value=numpy_helper.from_array(np.asarray(value, dtype))))

    def weight(self, *shape: int, gain: float = 1.0, offset: float = 0.0) -> str:
        name = f"onnx::weight_{len(self.weights)}"
        values = self._random.standard_normal(shape) * gain / np.sqrt(shape[0]) + offset
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name


def traced_decoder(seed: int = 0, learned_positions: bool = True, row_wise_end: bool = True) -> onnx.ModelProto:
    """Return a random decoder with past.

    Args:
        seed: of its weights.
        learned_positions: whether it takes ``position_ids``; if not, they are counted from ``attention_mask``.
        row_wise_end: whether what follows lm_head is known to work on each row by itself.
    """
    t = _Tracer(seed)
    embedded = t.op("Gather", t.weight(VOCAB, HIDDEN, gain=4), "input_ids")
    if learned_positions:
        positions = "position_ids"
    else:
        counted = t.op("Sub", t.op("CumSum", "attention_mask", t.constant(1)), t.constant(1))
        length = t.op("Shape", "past_key_values.0.key", start=2, end=3)
        positions = t.op("Slice", counted, length, t.constant([1 << 40]), t.constant([1]))
    hidden = t.op("Add", embedded, t.op("Gather", t.weight(CONTEXT, HIDDEN, gain=2), positions))
    mask = _causal_mask(t)
    for layer in range(LAYERS):
        normed = t.op("LayerNormalization", hidden, t.weight(HIDDEN, offset=1), t.weight(HIDDEN), axis=-1)
        stacked = t.op("MatMul", normed, t.weight(HIDDEN, 3 * HIDDEN, gain=1.5))
        query, key, value = t.op("Split", stacked, t.constant([HIDDEN] * 3), outputs=3, axis=2)
        heads = t.constant([0, 0, HEADS, HEAD_SIZE])
        query, key, value = (
            t.op("Transpose", t.op("Reshape", part, heads), perm=[0, 2, 1, 3]) for part in (query, key, value)
        )
        for name, rows in (("key", key), ("value", value)):
            joined = helper.make_node(
                "Concat", [f"past_key_values.{layer}.{name}", rows], [f"present.{layer}.{name}"], axis=-2
            )
            t.nodes.append(joined)
        keys = t.op("Transpose", f"present.{layer}.key", perm=[0, 1, 3, 2])
        scores = t.op("Div", t.op("MatMul", query, keys), t.constant(np.sqrt(HEAD_SIZE), np.float32))
        seen = t.op("Where", mask, scores, t.constant(-1e9, np.float32))
        attended = t.op("MatMul", t.op("Softmax", seen, axis=-1), f"present.{layer}.value")
        attended = t.op("Reshape", t.op("Transpose", attended, perm=[0, 2, 1, 3]), t.constant([0, 0, HIDDEN]))
        # As GPT-2 has its matrices.
        flat = t.op("Reshape", attended, t.constant([-1, HIDDEN]))
        flat = t.op("Gemm", flat, t.weight(HIDDEN, HIDDEN, gain=1.5), t.weight(HIDDEN))
        hidden = t.op("Add", hidden, t.op("Reshape", flat, t.op("Shape", hidden)))
    last = t.op("Identity", t.op("Relu", hidden) if row_wise_end else hidden)
    logits = t.op("MatMul", last, t.weight(HIDDEN, VOCAB, gain=3))
    if row_wise_end:
        logits = t.op("Mul", t.op("Tanh", logits), t.constant(6, np.float32))
    else:  # a tracer's detour that nobody recognises
        logits = t.op("Transpose", t.op("Transpose", logits, perm=[0, 2, 1]), perm=[0, 2, 1])
    t.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    return _model(t, learned_positions)


def _causal_mask(t: _Tracer) -> str:
    """Which columns each row sees, bool [1, 1, rows, total], from the past's length and the mask."""
    rows = t.op("Shape", "input_ids", start=1, end=2)
    past = t.op("Shape", "past_key_values.0.key", start=2, end=3)
    total = t.op("Add", past, rows)
    zero, one = t.constant(0), t.constant(1)
    columns = t.op("Unsqueeze", t.op("Range", zero, t.op("Squeeze", total), one), t.constant([0]))
    own = t.op("Range", t.op("Squeeze", past), t.op("Squeeze", total), one)
    causal = t.op("LessOrEqual", columns, t.op("Unsqueeze", own, t.constant([1])))
    ones = t.op("ConstantOfShape", total, value=numpy_helper.from_array(np.array([1], np.int64)))
    shown = t.op("Equal", "attention_mask", t.op("Unsqueeze", ones, t.constant([0])))
    return str(t.op("Unsqueeze", t.op("And", causal, shown), t.constant([0, 1])))


def _model(t: _Tracer, learned_positions: bool) -> onnx.ModelProto:
    past, total = "past_sequence_length", "past_sequence_length + sequence_length"

    def value(name: str, dtype: int, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, ["batch_size", *shape])

    slots = [f"{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
    inputs = [
        value("input_ids", TensorProto.INT64, "sequence_length"),
        value("attention_mask", TensorProto.INT64, total),
    ]
    inputs += [value("position_ids", TensorProto.INT64, "sequence_length")] if learned_positions else []
    inputs += [value(f"past_key_values.{slot}", TensorProto.FLOAT, HEADS, past, HEAD_SIZE) for slot in slots]
    outputs = [value("logits", TensorProto.FLOAT, "sequence_length", VOCAB)]
    outputs += [value(f"present.{slot}", TensorProto.FLOAT, HEADS, total, HEAD_SIZE) for slot in slots]
    graph = helper.make_graph(t.nodes, "main_graph", inputs, outputs, t.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return model


class PlainRun:
    """The traced graph itself, which is given every text from its beginning."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every token, float32 [tokens, vocab]."""
        feeds: dict[str, np.ndarray] = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, len(tokens)), np.int64),
            "position_ids": np.arange(len(tokens), dtype=np.int64)[None],
        }
        names = [value.name for value in self._session.get_inputs()]
        for name in names:
            if name.startswith("past"):
                feeds[name] = np.zeros((1, HEADS, 0, HEAD_SIZE), np.float32)
        (logits,) = self._session.run(["logits"], {name: feeds[name] for name in names})
        result: np.ndarray = logits[0]
        return result

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens that plain greedy decoding without a cache continues a prompt with."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def write_model(folder: Path, model: onnx.ModelProto, recipe: Recipe = RECIPES["fp32"]) -> GraphSizes:
    """Write a traced graph anew into a new folder."""
    folder.mkdir()
    with open_weight_file(folder / "model.onnx.data") as weights:
        graph, sizes = rewrite_graph(ir.from_proto(model), weights, recipe, "the model", lambda done, all_: None)
        ir.save(graph, folder / "model.onnx")
    return sizes


def traced_bundle(path: Path, target: onnx.ModelProto, draft: onnx.ModelProto | None = None) -> Path:
    """Write a bundle of traced graphs in float32, with a tokenizer of letters, and return its path."""
    from tiny_models import letter_tokenizer

    def record(name: str, model: onnx.ModelProto, folder: Path) -> ModelRecord:
        sizes = write_model(folder / name, model)
        facts = ArchitectureRecord(
            "by hand", sizes.layers, sizes.hidden_size, sizes.widest, sizes.kv_heads, sizes.kv_heads, sizes.head_size,
            sizes.logits_size, CONTEXT, (), None, 0, False,
        )  # fmt: skip
        graphs = (GraphRecord(f"{name}/model.onnx", tree=False, kv="float32", via="optimum"),)
        return ModelRecord("by hand", "ab" * 32, facts, RECIPES["fp32"].to_dict(), None, graphs, None)

    with new_bundle(path) as (folder, seal):
        letter_tokenizer(LETTERS).save(str(folder / "tokenizer.json"))
        seal(
            Manifest(
                created_by="the tests",
                device="cpu",
                vocab_size=VOCAB,
                context_length=CONTEXT,
                eos_token_ids=(),
                bos_token_id=None,
                special_token_ids=(VOCAB - 1,),
                named_tokens={},
                default_sampling={},
                target=record("target", target, folder),
                draft=None if draft is None else record("draft", draft, folder),
                files={},
            )
        )
    return path
