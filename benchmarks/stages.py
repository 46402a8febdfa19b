"""Where a campaign's time went, from its own records: by job, and within a GRPO step. Usage: stages.py CAMPAIGN [--json]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from evo_hpc.controller.state import read_state
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.atomic import read_json
from evo_hpc.store.schemas import STEP
from evo_hpc.store.tables import read_tables

PARTS = ("generate", "logprobs", "train", "publish", "other")
WARM_UP = 3


def jobs(paths: CampaignPaths) -> tuple[list[dict[str, Any]], float]:
    """Each attempt's start and length in seconds after the first start, and the whole from the first to the last event."""
    events = [json.loads(line) for line in paths.events.read_text().splitlines()]
    begin = events[0]["time"]
    rows = []
    for owner in (paths.base, *paths.versions()):
        for job in owner.jobs():
            for incarnation in job.incarnations():
                if incarnation.result.exists():
                    result = read_json(incarnation.result)
                    rows.append({
                        "job": f"{owner.root.name} {job.root.name}", "incarnation": incarnation.number, "outcome": result["outcome"],
                        "start": round(result["finished_at"] - result["seconds"] - begin, 1), "seconds": round(result["seconds"], 1),
                    })
    return sorted(rows, key=lambda row: row["start"]), events[-1]["time"] - begin


def step_split(paths: CampaignPaths, version: str) -> dict[str, Any]:
    """Median seconds of a step and of its parts, and their shares, the first steps left out."""
    table = read_tables(sorted(paths.version(version).steps.glob("*.parquet")), STEP).sort_by("step").slice(WARM_UP)
    import numpy as np

    median = {name: float(np.median(table.column(f"seconds_{name}").to_numpy())) for name in ("step", *PARTS)}
    total = {name: float(np.sum(table.column(f"seconds_{name}").to_numpy())) for name in ("step", *PARTS)}
    return {"steps": len(table), "median_seconds": median, "share": {name: total[name] / total["step"] for name in PARTS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("campaign", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    paths = CampaignPaths(arguments.campaign.absolute())
    state = read_state(paths)
    rows, seconds = jobs(paths)
    splits = {v.id: step_split(paths, v.id) for v in state.versions.values() if v.trained and v.node.policy_step}
    if arguments.json:
        print(json.dumps({"seconds": seconds, "jobs": rows, "steps": splits}, indent=1))
        return
    print(f"from the first event to the last: {seconds:.0f} s")
    for row in rows:
        print(f"  at {row['start']:6.1f} s  {row['seconds']:6.1f} s  {row['job']} ({row['outcome']})")
    for version, split in splits.items():
        shares = ", ".join(f"{name} {100 * split['share'][name]:.0f} %" for name in PARTS)
        print(f"{version}: {split['median_seconds']['step']:.2f} s a step (median of {split['steps']}): {shares}")


if __name__ == "__main__":
    main()
