"""Base of everything that comes in as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Fields(BaseModel):
    """Fields of a request: nothing is converted, and what is not known is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class LenientFields(BaseModel):
    """Fields of something that clients send back as they got it, perhaps from another server: more may be in it."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)
