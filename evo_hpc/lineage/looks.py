"""The looks ledger: the predeclared alpha sequence, one line written before each look at dev."""

from __future__ import annotations

import json
import time

from pydantic import BaseModel, ConfigDict, ValidationError

from evo_hpc.errors import UserError
from evo_hpc.paths import CampaignPaths
from evo_hpc.stats import alpha_for_look
from evo_hpc.store.atomic import write_bytes


class BadLedger(UserError):
    """looks.jsonl was damaged or edited: the alpha already spent is no longer known."""


class Look(BaseModel):
    """One look at a split by the gate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    """1 for the campaign's first look."""
    version: str
    against: str
    suite: str
    evaluator_epoch: str
    alpha: float
    """Spent by this look: 6 alpha / (pi^2 number^2)."""
    generation: int
    declared_at: float
    """Unix time in seconds."""


def read_looks(paths: CampaignPaths) -> list[Look]:
    """All looks so far. Raises BadLedger with file and line on anything that is not the ledger we wrote."""
    if not paths.looks.exists():
        return []
    looks = []
    for line_number, line in enumerate(paths.looks.read_text(encoding="utf-8").splitlines(), start=1):
        where = f"{paths.looks}:{line_number}"
        try:
            look = Look.model_validate(json.loads(line))
        except (json.JSONDecodeError, ValidationError) as error:
            raise BadLedger(f"{where}: not a look ({str(error).splitlines()[0]}). This ledger is what keeps the "
                            "campaign's significance honest: restore the file from a backup.") from error
        if look.number != line_number:
            raise BadLedger(f"{where}: look number {look.number}, expected {line_number}; a line was removed or added by hand")
        looks.append(look)
    return looks


def declare_look(paths: CampaignPaths, *, version: str, against: str, suite: str, epoch: str, alpha: float, generation: int) -> Look:
    """Write a look down before it is taken; the same look asked for again (after a crash) is the one already written."""
    looks = read_looks(paths)
    for look in looks:
        if (look.version, look.against, look.suite, look.evaluator_epoch) == (version, against, suite, epoch):
            return look
    number = len(looks) + 1
    look = Look(
        number=number, version=version, against=against, suite=suite, evaluator_epoch=epoch,
        alpha=alpha_for_look(number, alpha), generation=generation, declared_at=time.time(),
    )
    lines = [*looks, look]
    write_bytes(paths.looks, "".join(line.model_dump_json() + "\n" for line in lines).encode())
    return look
