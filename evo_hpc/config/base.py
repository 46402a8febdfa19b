"""What every configuration model shares: unknown keys are errors, values are frozen, field docstrings are descriptions."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Base of all models read from YAML. Immutable: a changed recipe is a new recipe."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )
