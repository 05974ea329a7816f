"""What a request may ask for beyond temperature and filters: accepted forms, ranges and messages."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, get_type_hints

import numpy as np
import pytest

from edge_spec.errors import RequestError
from edge_spec.runtime.options import GenerationOptions
from edge_spec.runtime.sampling_params import SamplingParams

TOKEN_LISTS = ["allowed_token_ids", "banned_token_ids", "stop_token_ids"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(["temperature"], [-0.1, math.nan, math.inf, 10**400, "hot", None, True, 1j]),
        *itertools.product(["top_k"], [-1, 1.5, 40.0, "40", None, True]),
        *itertools.product(["top_p"], [0, 0.0, -0.5, 1.01, math.nan, "all", None, True]),
        *itertools.product(["min_p"], [-0.01, 1.01, math.nan, "none", None, False]),
        *itertools.product(["seed"], [1.0, "1", True, 2**63, -(2**63) - 1, math.nan]),
        *itertools.product(["max_new_tokens"], [-1, -5, 2.5, "many", None, True]),
        *itertools.product(["stop"], ["", [""], ["ok", ""], [1], 5, None, b"end", ["a", None]]),
        *itertools.product(["repetition_penalty"], [0, -1.0, 1e-3, 101, math.nan, math.inf, "1", None, True]),
        *itertools.product(["presence_penalty", "frequency_penalty"], [-2.1, 2.1, math.nan, "0", None, True, 1j]),
        *itertools.product(["logit_bias"], [5, "bias", [1], [(1, 2, 3)], {"1": 2.0}, {-1: 2.0}, {True: 1.0}, None]),
        *itertools.product(TOKEN_LISTS, [5, "abc", b"abc", [1.0], [-1], ["1"], [True], {1: 2}]),
        *itertools.product(["banned_token_ids", "stop_token_ids"], [None]),
        *itertools.product(["logprobs"], [-1, 1.0, "5", True]),
        *itertools.product(["deadline"], [0, -1, math.nan, math.inf, "soon", True]),
    ],
)
def test_invalid_parameters_are_refused_with_name_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**{name: value})
    message = str(raised.value)
    assert message.startswith(f"{name} is {value!r}, expected ")
    assert len(message) > len(f"{name} is {value!r}, expected ")


@pytest.mark.parametrize("bias", [100.5, -101, math.nan, math.inf, "3", None])
def test_a_bias_out_of_range_is_refused_with_its_token(bias: Any) -> None:
    with pytest.raises(RequestError, match=r"logit_bias of token 7 is .*, expected a number from -100 to 100"):
        SamplingParams(logit_bias={7: bias})  # type: ignore[arg-type]


@pytest.mark.parametrize("masks", [{"allowed_token_ids": []}, {"allowed_token_ids": [3], "banned_token_ids": [3, 4]}])
def test_masks_that_leave_nothing_are_refused(masks: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids is .* leaves none of them; allow at least one"):
        SamplingParams(**masks)


def test_every_collection_becomes_a_sorted_tuple_so_that_parameters_can_be_compared_hashed_and_replaced() -> None:
    params = SamplingParams(
        logit_bias={9: 1, np.int64(2): np.float32(0.5), 4: 0.0},  # type: ignore[arg-type]
        allowed_token_ids={5, 3, 9},  # type: ignore[arg-type]
        banned_token_ids=np.array([4, 1, 4]),  # type: ignore[arg-type]
        stop_token_ids=range(2),  # type: ignore[arg-type]
        repetition_penalty=2,
    )
    assert params.logit_bias == ((2, 0.5), (9, 1.0))
    assert params.allowed_token_ids == (3, 5, 9)
    assert params.banned_token_ids == (1, 4)
    assert params.stop_token_ids == (0, 1)
    assert type(params.banned_token_ids[0]) is int and type(params.repetition_penalty) is float
    again = replace(params, seed=3)
    assert replace(again, seed=None) == params
    assert len({params, again, replace(again, seed=None)}) == 2
    assert again.seeded() is again


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_any_penalty_makes_the_law_depend_on_the_history(penalty: str) -> None:
    assert not SamplingParams(temperature=1.0).penalizes
    assert SamplingParams(**{penalty: 1.5}).penalizes


@pytest.mark.parametrize("name", [*TOKEN_LISTS, "logit_bias"])
def test_tokens_the_vocabulary_lacks_are_refused(name: str) -> None:
    tokens = [2, 10, 3]
    params = SamplingParams(**{name: dict.fromkeys(tokens, 1.0) if name == "logit_bias" else tokens})
    params.require_vocabulary(11)
    with pytest.raises(RequestError, match=f"{name} holds token id 10, .* ids 0 to 9"):
        params.require_vocabulary(10)


def test_banning_the_whole_vocabulary_is_refused() -> None:
    params = SamplingParams(banned_token_ids=range(10))  # type: ignore[arg-type]
    params.require_vocabulary(11)
    with pytest.raises(RequestError, match="banned_token_ids holds all 10 tokens"):
        params.require_vocabulary(10)


def test_every_parameter_is_an_option_of_generate() -> None:
    assert set(get_type_hints(SamplingParams)) <= set(GenerationOptions.__annotations__)
