"""The committed result of one look: who was compared with whom, on which evaluations, and how it came out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from evo_hpc.errors import UserError
from evo_hpc.lineage.decision import Verdict
from evo_hpc.lineage.looks import BadLedger, Look
from evo_hpc.lineage.signed import Signed
from evo_hpc.stats import PairedComparison
from evo_hpc.store.atomic import read_json


class BadComparison(UserError):
    """A comparison's file was damaged or edited."""


class Interval(BaseModel):
    """A paired difference over tasks with its interval (see stats.PairedComparison)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_tasks: int
    k: int
    mean_a: float
    mean_b: float
    difference: float
    ci_low: float
    ci_high: float
    alpha: float
    p_value: float
    method: str
    missing_a: int
    missing_b: int
    draws: int
    seed: int
    degenerate: bool
    note: str
    excludes_zero: bool
    """False, too, where nothing is known of the spread."""

    @classmethod
    def of(cls, found: PairedComparison) -> Interval:
        """The record of a comparison."""
        return cls(**asdict(found), excludes_zero=found.excludes_zero and not found.degenerate)


class Comparison(Signed):
    """One file of `comparisons/`."""

    schema_version: int = 1
    version: str
    against: str
    suite: str
    evaluator_epoch: str
    look: Look
    claim: str
    """What the numbers may be taken for."""
    interval: Interval
    """At 95 %."""
    at_look_alpha: Interval
    """At the alpha that this look spends: what the gate decides by."""
    interval_t: Interval
    """At 95 % by the t method, as a check."""

    @property
    def verdict(self) -> Verdict:
        """Where the interval at the look's alpha lies: above zero, around it, below it."""
        seen = self.at_look_alpha
        if not seen.excludes_zero:
            return "not shown"
        return "better" if seen.difference > 0 else "worse"

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return self.model_dump(mode="json")


def read_comparison(path: Path, looks: Collection[Look]) -> Comparison:
    """A comparison, checked against the ledger. Raises BadComparison, or BadLedger when its look is not in the ledger."""
    try:
        found = Comparison.model_validate(read_json(path))
    except ValidationError as error:
        problem = error.errors()[0]
        raise BadComparison(f"{path}: not a comparison ({'.'.join(map(str, problem['loc']))}: {problem['msg']}). Restore it, or remove it: "
                            "the look that it took stays spent and is taken again as the same look") from error
    if not found.intact():
        raise BadComparison(f"{path}: edited after it was written (its digest differs). Restore it, or remove it: the same look is taken again")
    if found.look not in looks:
        raise BadLedger(f"{path}: its look number {found.look.number} is not in the ledger; the ledger was shortened or edited by hand. "
                        "Restore it from a backup")
    return found
