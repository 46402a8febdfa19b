"""The looks ledger: written before, never rewritten, the same look once, no free looks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evo_hpc.lineage.looks import BadLedger, Look, declare_look, read_looks
from evo_hpc.paths import CampaignPaths


def declare(paths: CampaignPaths, version: str, epoch: str = "e", evaluations: tuple[str, str] = ("a", "b"), alpha: float = 0.05) -> Look:
    return declare_look(
        paths, version=version, against="v0000", suite="dev", epoch=epoch, evaluations=evaluations, alpha=alpha, generation=1
    )


def test_alpha_falls_and_adds_up(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    alphas = [declare(paths, f"v{i:04d}").alpha for i in range(1, 40)]
    assert alphas == sorted(alphas, reverse=True) and 0.04 < sum(alphas) < 0.05
    assert [look.number for look in read_looks(paths)] == list(range(1, 40))


def test_the_same_look_is_spent_once_and_new_evaluations_are_a_new_look(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    assert declare(paths, "v0001") == declare(paths, "v0001")
    assert len(read_looks(paths)) == 1
    assert declare(paths, "v0001", epoch="another").number == 2
    assert declare(paths, "v0001", evaluations=("a", "retrained")).number == 3


def test_alpha_cannot_be_raised_after_the_first_look(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    declare(paths, "v0001")
    with pytest.raises(BadLedger, match="gate.alpha is 0.9, but 0.05 was declared before the first look"):
        declare(paths, "v0002", alpha=0.9)
    assert len(read_looks(paths)) == 1


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("damage, message", [
    (lambda p: p.look(1).unlink(), r"look-000002\.json: look number 2, expected 1"),
    (lambda p: p.look(2).write_text("{torn"), r"look-000002\.json:1: not valid JSON"),
    (lambda p: p.look(2).write_text("{}"), r"look-000002\.json: not a look"),
    (lambda p: edit(p.look(2), number=1), r"look number 1, expected 2"),
    (lambda p: edit(p.look(2), alpha=0.04), r"alpha 0.04 is not term 2 of the sequence declared for 0.05"),
    (lambda p: edit(p.look(2), total_alpha=0.9), r"not term 2 of the sequence"),
])
def test_an_edited_ledger_is_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    paths = CampaignPaths(tmp_path)
    declare(paths, "v0001")
    declare(paths, "v0002")
    damage(paths)
    with pytest.raises(Exception, match=message):
        read_looks(paths)
    with pytest.raises(Exception, match=message):
        declare(paths, "v0003")
