"""What every kind of completion may ask for: OpenAI's fields and those of edge-spec's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from edge_spec.serve.api_error import ApiError
from edge_spec.serve.fields import Fields, LenientFields

# What OpenAI's API takes where a request does not say.
DEFAULT_TEMPERATURE = 1.0

MOST_CHOICES = 16
_MOST_STOPS = 16
_LONGEST_STOP = 1000
_MOST_BIASES = 4096
_LONGEST_ID = 9  # digits
_INT64 = 2**63


class StreamOptions(LenientFields):
    """What a stream holds besides the text."""

    include_usage: bool | None = False


class GrammarFields(Fields):
    """What the text has to match: one of the two."""

    regex: str | None = None
    lark: str | None = None

    @model_validator(mode="after")
    def _require_one(self) -> GrammarFields:
        if (self.regex is None) == (self.lark is None):
            raise ValueError('expected {"regex": ...} or {"lark": ...}')
        return self


class GenerationFields(Fields):
    """What every kind of completion may ask for."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=1, ge=1, le=MOST_CHOICES)
    temperature: float | None = Field(default=DEFAULT_TEMPERATURE, ge=0, le=2)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    presence_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64 - MOST_CHOICES)
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None

    speculation: str | None = Field(default="auto", max_length=100)
    top_k: int | None = Field(default=0, ge=0, lt=_INT64)
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=1.0, ge=0.01, le=100)
    token_details: bool | None = False
    grammar: GrammarFields | None = None

    # They change nothing about the text, and clients send them without being asked.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None

    # They would change the answer, which they cannot do here; the values that leave it alone.
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > _MOST_STOPS or not all(0 < len(string) <= _LONGEST_STOP for string in strings):
            raise ValueError(f"expected at most {_MOST_STOPS} strings of 1 to {_LONGEST_STOP} characters")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (biases or {}).items():
            if not (token.isascii() and token.isdecimal() and len(token) <= _LONGEST_ID) or not -100 <= bias <= 100:
                raise ValueError("expected token ids, each with a number from -100 to 100")
        if len(biases or {}) > _MOST_BIASES:
            raise ValueError(f"expected at most {_MOST_BIASES} token ids")
        return biases

    @property
    def choices(self) -> int:
        """How many answers are wanted to each prompt."""
        return self.n or 1

    @property
    def streams(self) -> bool:
        """Whether the answer is to come piece by piece."""
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream is to end with how many tokens it took."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def require_supported(self, model: str) -> None:
        """Raise ApiError if the request asks for another model than ``model``, or for what would change the answer."""
        if self.model not in (None, "", model):
            raise ApiError(
                404, f"There is no model {self.model[:200]!r} here, only {model!r}.", "model", "model_not_found"
            )
        for name, neutral in self.refused.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise ApiError(400, f"{name} is not supported by this server; leave it out.", name, "unsupported")

    def common_options(self) -> dict[str, Any]:
        """Return the options of :meth:`edge_spec.Engine.stream` that do not depend on the kind of completion."""
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
            if getattr(self, name) is not None
        }
        return {
            **given,
            "temperature": DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            "seed": self.seed,
            "stop": self.stop or (),
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "speculation": self.speculation or "auto",
        }
