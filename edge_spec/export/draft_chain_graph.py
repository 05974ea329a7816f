"""Builds the graph that drafts several tokens in one call: a decoder's step, repeated, each with its choice of a token.

A step's token is the next step's input, so that nothing has to leave the device between two tokens
(docs/graph-contract.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edge_spec.export.architecture import Architecture
from edge_spec.export.graph import DecoderPass
from edge_spec.export.graph_attention import GraphAttention
from edge_spec.export.graph_tape import GraphTape, describe
from edge_spec.export.packing import PackedModel
from edge_spec.export.recipe import Device

# Tokens of one call, by the flavour of the graphs. On a CPU a call costs next to nothing beside its step, and being
# able to stop after each token is worth more.
CHAIN_LENGTHS: dict[Device, tuple[int, ...]] = {"cpu": (), "cuda": (2, 4)}


@dataclass(frozen=True)
class ChoiceOfTokens:
    """What a draft may choose from.

    Attributes:
        columns: the first so many columns of its logits stand for ids.
        ids: int64 [columns], which ids; ``None`` where column i stands for id i.
    """

    columns: int
    ids: npt.NDArray[np.int64] | None = None


def build_draft_chain(
    architecture: Architecture, model: PackedModel, device: Device, steps: int, choice: ChoiceOfTokens
) -> ir.Model:
    """Build the graph over a packed model, whose weights lie in it once, whatever the number of steps.

    Args:
        architecture: sizes of the model.
        model: the weights.
        device: decides the compute type and the kernels' attributes.
        steps: tokens to draft, 2 at least.
        choice: what they are chosen from.
    """
    tape = GraphTape(device)
    token = tape.input("input_ids", ir.DataType.INT64, [1, "rows"])
    # Without positions and a bias, as all chains where attention has a faster kernel for them.
    attention = GraphAttention(tape, architecture, None, False, model.rotary, None)
    chooser = _Chooser(tape, steps, choice)
    last = tape.constant("last_row", np.array([-1], np.int64))
    tokens, shares = [], []
    for step in range(steps):
        attention.begin_step(step)
        decoder = DecoderPass(tape, architecture, attention, token, model, f"{step}.")
        token, share = chooser.choose(decoder.logits(None if step else last), step)
        tokens.append(token)
        shares.append(share)
    ids = describe(tape.op("Concat", tokens, {"axis": 1}), "draft_ids", ir.DataType.INT64, [1, steps])
    probabilities = describe(tape.op("Concat", shares, {"axis": 1}), "draft_shares", ir.DataType.FLOAT, [1, steps])
    return tape.finish([ids, probabilities, *attention.presents])


class _Chooser:
    """The nodes that choose a token by its logit and by noise, which the runtime gives for every step."""

    def __init__(self, tape: GraphTape, steps: int, choice: ChoiceOfTokens) -> None:
        self._tape = tape
        self._choice = choice
        self._inverse_temperature = tape.input("inverse_temperature", ir.DataType.FLOAT, [1])
        # One column where nothing is drawn: what is the same for all tokens decides nothing.
        self._noise = tape.input("noise", ir.DataType.FLOAT, [steps, "noise_columns"])

    def choose(self, logits: ir.Value, step: int) -> tuple[ir.Value, ir.Value]:
        """Append the choice of a step.

        Args:
            logits: float32 [1, 1, columns], padding included.
            step: which.

        Returns:
            int64 [1, 1], the token; and float32 [1, 1], its probability at the temperature.
        """
        tape = self._tape
        usable = [tape.constant(name, np.array([number], np.int64)) for name, number in self._usable_columns()]
        # Padding is never chosen, and has no share in the probabilities.
        row = tape.op("Squeeze", [tape.op("Slice", [logits, *usable]), tape.constant("rows_axis", np.array([1]))])
        scaled = tape.op("Mul", [row, self._inverse_temperature])
        noise = tape.op("Gather", [self._noise, tape.constant(f"step.{step}", np.array([step]))], {"axis": 0})
        column = tape.op("ArgMax", [tape.op("Add", [scaled, noise])], {"axis": 1, "keepdims": 1})
        share = tape.op("GatherElements", [tape.op("Softmax", [scaled], {"axis": 1}), column], {"axis": 1})
        if self._choice.ids is None:
            return column, share
        return tape.op("Gather", [tape.constant("column_ids", self._choice.ids), column], {"axis": 0}), share

    def _usable_columns(self) -> tuple[tuple[str, int], ...]:
        return ("first_column", 0), ("columns", self._choice.columns), ("columns_axis", 2)
