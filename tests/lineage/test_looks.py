"""The looks ledger: written before, never rewritten, the same look once."""

from __future__ import annotations

from pathlib import Path

import pytest

from evo_hpc.lineage.looks import BadLedger, declare_look, read_looks
from evo_hpc.paths import CampaignPaths


def declare(paths: CampaignPaths, version: str, epoch: str = "e") -> float:
    return declare_look(paths, version=version, against="v0000", suite="dev", epoch=epoch, alpha=0.05, generation=1).alpha


def test_alpha_falls_and_adds_up(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    alphas = [declare(paths, f"v{i:04d}") for i in range(1, 40)]
    assert alphas == sorted(alphas, reverse=True) and 0.04 < sum(alphas) < 0.05
    assert [look.number for look in read_looks(paths)] == list(range(1, 40))


def test_the_same_look_is_spent_once(tmp_path: Path) -> None:
    paths = CampaignPaths(tmp_path)
    assert declare(paths, "v0001") == declare(paths, "v0001")
    assert len(read_looks(paths)) == 1
    assert declare(paths, "v0001", epoch="another") < declare(paths, "v0001")


@pytest.mark.parametrize("damage, message", [
    (lambda lines: lines[1:], r"looks\.jsonl:1: look number 2, expected 1"),
    (lambda lines: [lines[0], "{torn"], r"looks\.jsonl:2: not a look"),
    (lambda lines: [lines[0], lines[0]], r"looks\.jsonl:2: look number 1, expected 2"),
])
def test_an_edited_ledger_is_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    paths = CampaignPaths(tmp_path)
    declare(paths, "v0001")
    declare(paths, "v0002")
    paths.looks.write_text("\n".join(damage(paths.looks.read_text().splitlines())) + "\n")
    with pytest.raises(BadLedger, match=message):
        read_looks(paths)
    with pytest.raises(BadLedger):
        declare(paths, "v0003")
