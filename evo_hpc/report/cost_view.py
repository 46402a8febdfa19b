"""What a campaign has cost, by version and kind of work, against its budget: as a record, and as tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evo_hpc.controller.budget import CAMPAIGN, CAPS, check, problems
from evo_hpc.controller.settings import load_settings
from evo_hpc.controller.spending import CostBook, Work, all_jobs, goodput, spent, works
from evo_hpc.dispatch.slurm.records import SlurmJob
from evo_hpc.jobs.cost import Cost, total
from evo_hpc.paths import CampaignPaths
from evo_hpc.report.views import percent, printable


_NOTES = ("Share: of the GPU hours, or of the wall hours where no GPU was used. "
          "Goodput: the part of the seconds that jobs ran that ended in a result; of work that is over.")


def cost_record(paths: CampaignPaths, accounted: Iterable[SlurmJob] = ()) -> dict[str, Any]:
    """All costs of a campaign. `accounted`: jobs as sacct shows them now, where it was asked; what is recorded needs it no more.

    Raises UserError or StoreError when a file that tells is damaged.
    """
    settings = load_settings(paths)
    attempts = CostBook().read(all_jobs(paths), accounted)
    done, used = works(paths, attempts), spent(attempts)
    whole = used.campaign
    overruns = check(settings.campaign.budget, used)
    budget = settings.campaign.budget
    return {
        "campaign": settings.campaign.name, "folder": str(paths.root),
        "work": [_row(whole, [work], owner=work.owner, kind=work.kind, attempts=work.attempts) for work in done],
        "kinds": [_row(whole, each, kind=kind) for kind, each in _grouped(done).items()],
        "total": _row(whole, done),
        "budget": {
            "grace": budget.grace, "caps": [
                {"cap": cap, "limit": limit, "used": None if of_version else getattr(whole, field), "unit": unit}
                for cap, (of_version, field, unit) in CAPS.items() if (limit := getattr(budget, cap)) is not None
            ],
            "overruns": [
                {"scope": o.scope, "cap": o.cap, "used": o.used, "limit": o.limit, "stops_running_jobs": o.stops, "text": text}
                for o, text in zip(overruns, problems(paths, overruns), strict=True)
            ],
        },
    }


def _grouped(done: Iterable[Work]) -> dict[str, list[Work]]:
    found: dict[str, list[Work]] = {}
    for work in done:
        found.setdefault(work.kind, []).append(work)
    return found


def _row(whole: Cost, done: list[Work], **names: Any) -> dict[str, Any]:
    """Sums of some work; its share is of the GPU hours where any were used, else of the hours that jobs ran."""
    cost = total(work.cost for work in done)
    part, of = (cost.gpu_hours, whole.gpu_hours) if whole.gpu_hours else (cost.wall_hours, whole.wall_hours)
    known = [work.useful_seconds for work in done if work.useful_seconds is not None]
    return {
        **names, **cost.model_dump(), "share": part / of if of else None, "allocated_seconds": 3600 * cost.wall_hours,
        "useful_seconds": sum(known) if known else None, "goodput": goodput(done),
    }


def cost_view(record: dict[str, Any]) -> RenderableType:
    """The record as tables."""
    record = printable(record)
    if not record["work"]:
        return Text(f"{record['campaign']} has run no jobs yet: it has cost nothing.")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("version", "work", "GPU hours", "node hours", "wall hours", "share %", "goodput %", "starts", "source"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("version", "work", "source") else "right")
    for row in record["work"]:
        table.add_row(row["owner"], row["kind"], *_cells(row))
    table.add_section()
    for row in record["kinds"]:
        table.add_row("all", row["kind"], *_cells(row), style="dim")
    table.add_row("all", "", *_cells(record["total"]), style="bold")
    head = Text.assemble((record["campaign"], "bold"), "  ", (record["folder"], "dim"))
    return Group(head, Text(), table, Text(), *_budget(record), Text(_NOTES, "dim"))


def _cells(row: dict[str, Any]) -> list[str]:
    hours = [_hours(row[name]) for name in ("gpu_hours", "node_hours", "wall_hours")]
    return [*hours, percent(row["share"]), percent(row["goodput"]), str(row["starts"]), row["source"]]


def _hours(value: float) -> str:
    """Three digits that count: 0.00421, 12.3, 1540."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _budget(record: dict[str, Any]) -> list[Text]:
    budget = record["budget"]
    if not budget["caps"]:
        return [Text("No budget is set: see `budget` in campaign.yaml.", "dim")]
    lines = []
    for cap in budget["caps"]:
        if cap["used"] is None:
            lines.append(Text(f"Cap of each version: {_hours(cap['limit'])} {cap['unit']}"))
        else:
            used = f"{_hours(cap['used'])} of {_hours(cap['limit'])} {cap['unit']} used ({percent(cap['used'] / cap['limit'])} %)"
            lines.append(Text(f"Cap of the {CAMPAIGN}: {used}"))
    return [*lines, *(Text(overrun["text"], "red" if overrun["stops_running_jobs"] else "yellow") for overrun in budget["overruns"])]
