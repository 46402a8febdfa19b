"""The looks ledger: the predeclared alpha sequence, one write-once record before each look at dev."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.stats import alpha_for_look
from evo_hpc.store.atomic import dump_json, read_json, write_once


class BadLedger(UserError):
    """The ledger was damaged or edited: the alpha already spent is no longer known."""


class Look(BaseModel):
    """One look at a split by the gate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    """1 for the campaign's first look."""
    version: str
    against: str
    suite: str
    evaluator_epoch: str
    evaluations: tuple[str, str]
    """Identities of the two evaluations, the parent's first: new evaluations are a new look."""
    total_alpha: float
    """What all looks together may spend; declared by the first."""
    alpha: float
    """Spent by this look: 6 total_alpha / (pi^2 number^2)."""
    generation: int
    declared_at: float
    """Unix time in seconds."""


def read_looks(paths: CampaignPaths, known: Sequence[Look] = ()) -> list[Look]:
    """All looks so far; the first ones, where they are `known`, are not read again. Raises BadLedger, naming the file, on a gap, an edit, or another alpha sequence."""
    looks: list[Look] = []
    restore = "This ledger keeps the campaign's significance honest: restore the file from a backup."
    for expected, (number, path) in enumerate(paths.looks(), start=1):
        if expected == number <= len(known):
            looks.append(known[expected - 1])
            continue
        try:
            look = Look.model_validate(read_json(path))
        except ValidationError as error:
            raise BadLedger(f"{path}: not a look ({error.errors()[0]['msg']}). {restore}") from error
        if number != expected or look.number != number:
            raise BadLedger(f"{path}: look number {look.number}, expected {expected}; one was removed or added by hand. {restore}")
        total = looks[0].total_alpha if looks else look.total_alpha
        if look.total_alpha != total or look.alpha != alpha_for_look(number, total):
            raise BadLedger(f"{path}: alpha {look.alpha} is not term {number} of the sequence declared for {total}. {restore}")
        looks.append(look)
    return looks


def check_alpha(paths: CampaignPaths, looks: list[Look], alpha: float) -> None:
    """Raise BadLedger when `alpha` is not what the first look declared."""
    if looks and looks[0].total_alpha != alpha:
        raise BadLedger(f"{paths.campaign_yaml}: gate.alpha is {alpha}, but {looks[0].total_alpha} was declared before the first look at dev "
                        "and cannot change any more; restore it")


def declare_look(
    paths: CampaignPaths, *, version: str, against: str, suite: str, epoch: str, evaluations: tuple[str, str], alpha: float, generation: int
) -> Look:
    """Write a look down before it is taken; the same look asked for again (after a crash) is the one already written.

    Raises BadLedger when `alpha` is not what the first look declared, AlreadyWritten when another controller was first.
    """
    looks = read_looks(paths)
    for look in looks:
        if (look.version, look.against, look.suite, look.evaluator_epoch, look.evaluations) == (version, against, suite, epoch, evaluations):
            return look
    check_alpha(paths, looks, alpha)
    number = len(looks) + 1
    look = Look(
        number=number, version=version, against=against, suite=suite, evaluator_epoch=epoch, evaluations=evaluations,
        total_alpha=alpha, alpha=alpha_for_look(number, alpha), generation=generation, declared_at=time.time(),
    )
    write_once(paths.look(number), dump_json(look.model_dump(mode="json")))
    return look
