"""Where a campaign's time went, from its own records: by job, engine starts, analyzers, and within a GRPO step.

Usage: stages.py CAMPAIGN [--json].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from evo_hpc.config.yaml_io import load_tree
from evo_hpc.controller.state import read_state
from evo_hpc.harness.analysis import read_analysis, read_watches
from evo_hpc.paths import CampaignPaths, IncarnationPaths
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
    for owner in (paths.base, *paths.versions(), paths.final):
        for job in owner.jobs():
            for incarnation in job.incarnations():
                if incarnation.result.exists():
                    result = read_json(incarnation.result)
                    rows.append({
                        "job": f"{owner.root.name} {job.root.name}", "incarnation": incarnation.number, "outcome": result["outcome"],
                        "start": round(result["finished_at"] - result["seconds"] - begin, 1), "seconds": round(result["seconds"], 1), "engine_start": _engine_start(incarnation),
                    })
    return sorted(rows, key=lambda row: row["start"]), events[-1]["time"] - begin


def _engine_start(incarnation: IncarnationPaths) -> float | None:
    """Seconds from the start of the role that holds the engine until it could sample; null where there is none."""
    for role in ("rollout", "evaluator"):
        if incarnation.effective(role).exists():
            return float(load_tree(incarnation.effective(role))["start_seconds"])
    return None


def analyzers(paths: CampaignPaths) -> dict[str, float]:
    """Seconds that the analyzers took: on finished versions and in the live watch, and how often they ran."""
    versions = paths.versions()
    analyses = [a.seconds for v in versions for _, folder in v.analyses() if (a := read_analysis(v, folder.name)) is not None]
    looks = [look.seconds for v in versions for look in read_watches(v)]
    return {"analyses": len(analyses), "analyses_seconds": sum(analyses), "looks": len(looks), "looks_seconds": sum(looks)}


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
    splits = {v.id: step_split(paths, v.id) for v in state.versions.values() if v.node.paths.train.exists()}
    found = analyzers(paths)
    busy, starts = sum(row["seconds"] for row in rows), sum(row["engine_start"] or 0.0 for row in rows)
    if arguments.json:
        print(json.dumps({
            "seconds": seconds, "jobs": rows, "steps": splits, "job_seconds": busy, "engine_start_share": starts / busy, "analyzers": found,
        }, indent=1))
        return
    print(f"from the first event to the last: {seconds:.0f} s")
    for row in rows:
        print(f"  at {row['start']:6.1f} s  {row['seconds']:6.1f} s  {row['job']} ({row['outcome']})")
    print(f"engine starts: {starts:.0f} of {busy:.0f} s of jobs ({100 * starts / busy:.0f} %)")
    print(f"analyzers: {found['analyses']} analyses in {found['analyses_seconds']:.1f} s, {found['looks']} live looks in {found['looks_seconds']:.1f} s "
          f"({100 * (found['analyses_seconds'] + found['looks_seconds']) / seconds:.1f} % of the whole)")
    for version, split in splits.items():
        shares = ", ".join(f"{name} {100 * split['share'][name]:.0f} %" for name in PARTS)
        print(f"{version}: {split['median_seconds']['step']:.2f} s a step (median of {split['steps']}): {shares}")


if __name__ == "__main__":
    main()
