"""What the terminal shows of a campaign, first as plain records (for --json), then as rich tables."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evo_hpc.controller.actions import Action, Commit, CreateVersion, EndEarly, GiveUp, Kill, MakeHarness, MakeTasks, Plan, Propose, Publish, Start, Stop, Submit
from evo_hpc.controller.control import wish_of
from evo_hpc.controller.ownership import job_lives
from evo_hpc.controller.plan import make_plan
from evo_hpc.controller.state import CampaignState, VersionState
from evo_hpc.dispatch.status import LIVE, JobStatus
from evo_hpc.evaluation.scores import EvaluationRecord
from evo_hpc.lineage.looks import read_looks
from evo_hpc.lineage.tree import node_changes
from evo_hpc.report.words import visible
from evo_hpc.store.atomic import StoreError, read_json
from evo_hpc.paths import CampaignPaths
from evo_hpc.store.lease import current_owner, owner_may_live

PHASE_STYLE = {"running": "cyan", "queued": "cyan", "unknown": "yellow", "done": "green", "failed": "red", "dead": "yellow", "planned": "dim", "finished": "green"}


def progress_of(status: JobStatus) -> dict[str, Any]:
    """What a job last said of itself; empty when it has said nothing yet."""
    if status.incarnation is None:
        return {}
    path = status.job.incarnation(status.incarnation).progress
    try:
        return read_json(path) if path.exists() else {}
    except StoreError:
        return {}


def job_record(status: JobStatus) -> dict[str, Any]:
    """One attempt."""
    phase = status.record.state if status.record else status.phase
    record: dict[str, Any] = {
        "owner": status.job.owner.name, "job": status.job.root.name, "kind": status.job.kind, "state": phase, "pid": status.pid,
        "incarnation": status.incarnation, "slurm_job": status.slurm_id, "said": status.said,
        "said_seconds_ago": round(time.time() - status.said_at, 1) if status.said_at is not None else None,
        "starts": status.starts, "endings": list(status.endings),
    }
    if status.record:
        record.update(seconds=status.record.seconds, error=status.record.error)
    if status.live:
        progress = progress_of(status) if status.phase != "queued" else {}
        record["progress"] = {k: v for k, v in progress.items() if k not in ("role", "time")}
        record["seen_seconds_ago"] = round(time.time() - progress["time"], 1) if "time" in progress else None
    return record


def evaluation_record(record: EvaluationRecord | None) -> dict[str, Any] | None:
    """One evaluation's score."""
    if record is None:
        return None
    return {
        "avg_at_k": record.avg_at_k, "k": record.k, "tasks": len(record.task_ids), "rollouts": record.rollouts,
        "missing": record.missing, "epoch": record.epoch, "policy_step": record.policy_step,
    }


def version_stage(version: VersionState) -> str:
    """How far a version is, in one word or two."""
    if version.decision is not None:
        stopped = version.decision.outcome == "stopped_early"
        if version.cancelled:
            return "cancelled"
        verb = {"keep": "kept", "merge": "kept", "prune": "pruned", "revert": "reverted"}[version.decision.decision]
        return f"{verb}{', stopped early' if stopped else ', promoted' if version.decision.promoted else ''}"
    running = [s for attempts in version.jobs.values() for s in attempts if s.live]
    if running and all(s.phase == "queued" for s in running):
        return "queued"
    if running:
        return {"train": "training", "evaluate": "evaluating"}.get(running[0].job.kind, "running")
    if version.stopped_early is not None:
        return "stopped early"
    last = [attempts[-1] for attempts in version.jobs.values()]
    if version.evaluated:
        return "evaluated"
    if any(s.record and s.record.state == "failed" for s in last):
        return "failed"
    return "trained" if version.trained and version.node.policy_step else "waiting"


def version_record(state: CampaignState, version: VersionState) -> dict[str, Any]:
    """One version: where it comes from, how far it is, what it scored."""
    node = version.node
    parent = state.versions.get(node.version.parents[0]) if node.version.parents else None
    return {
        "id": version.id, "parents": node.version.parents, "init": node.init, "author": node.version.author,
        "hypothesis": node.version.hypothesis, "steps": node.recipe.steps, "stage": version_stage(version),
        "factors": sorted({c.factor for c in node_changes(parent.node, node)}) if parent else [],
        "evaluations": {suite: evaluation_record(record) for suite, record in version.evaluations.items()},
        "decision": version.decision.model_dump(mode="json") if version.decision else None,
        "prediction": node.version.prediction.model_dump(mode="json") if node.version.prediction else None, "rule": node.version.rule,
        "rollback": node.version.rollback, "evidence": [c.model_dump(mode="json") for c in node.version.evidence],
        "stopped_early": {"step": version.stopped_early.step, "findings": list(version.stopped_early.futile)} if version.stopped_early else None,
        "findings": [f.model_dump(mode="json") for f in version.analysis.findings] if version.analysis else [],
        "comparisons": [c.record() for c in version.comparisons], "jobs": [job_record(s) for attempts in version.jobs.values() for s in attempts],
        "folder": str(node.paths.root),
    }


def controller_record(paths: CampaignPaths) -> dict[str, Any] | None:
    """Who owns the campaign, and whether it lives; None when nobody ever did."""
    owner = current_owner(paths)
    return None if owner is None else {
        "generation": owner.generation, "host": owner.process.host, "pid": owner.process.pid, "slurm_job": owner.slurm_job_id,
        "running": owner_may_live(owner, time.time(), job_lives), "heartbeat_seconds_ago": round(time.time() - owner.heartbeat_at, 1),
    }


def status_record(state: CampaignState) -> dict[str, Any]:
    """The whole campaign."""
    control, problem = wish_of(state)
    looks = read_looks(state.paths)
    return {
        "campaign": state.settings.campaign.name, "folder": str(state.paths.root), "domain": state.settings.campaign.domain.name,
        "controller": controller_record(state.paths), "control": {"state": control.state, "cancel": control.cancel, "reason": control.reason, "problem": problem},
        "done": make_plan(state, 0, None, control).done, "base_policy": state.base_policy, "tasks": {split: s.tasks for split, s in state.tasks.splits.items()} if state.tasks else None,
        "versions": [version_record(state, version) for version in state.versions.values()], "incumbent": state.incumbent_before(None),
        "harness": state.harness.id if state.harness else None, "rounds": len(state.rounds),
        "jobs": [job_record(s) for s in state.all_jobs()],
        "looks": len(looks), "alpha_spent": sum(look.alpha for look in looks), "alpha": state.settings.campaign.gate.alpha,
    }


def printable(value: Any) -> Any:
    """The same record with control characters of its texts made visible: what a file says must not steer the terminal."""
    if isinstance(value, dict):
        return {key: printable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [printable(inner) for inner in value]
    if isinstance(value, str):
        return visible(value)
    return value


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def verdict(comparison: dict[str, Any]) -> Text:
    """A comparison in one line: the difference in points, its interval, n, and whether zero is outside."""
    i = comparison["interval"]
    style = "green" if i["ci_low"] > 0 else "red" if i["ci_high"] < 0 else "yellow"
    text = Text(f"{100 * i['difference']:+.1f} points over {comparison['against']} on {comparison['suite']}", style)
    text.append(f"  95 % interval [{100 * i['ci_low']:+.1f}, {100 * i['ci_high']:+.1f}], n = {i['n_tasks']} tasks x {i['k']}")
    if i["missing_a"] or i["missing_b"]:
        text.append(f", missing {i['missing_a']} and {i['missing_b']} (counted as failures)", "yellow")
    if i["degenerate"]:
        text.append(f"; {i['note']}", "yellow")
    return text


def status_view(record: dict[str, Any]) -> RenderableType:
    """The status as tables."""
    record = printable(record)
    head = Text.assemble((record["campaign"], "bold"), f"  {record['domain']}  ", (record["folder"], "dim"))
    controller = record["controller"]
    if controller is None:
        who = Text("No controller has run this campaign yet: start it with `evo-hpc run`.", "dim")
    elif controller["running"]:
        slurm = f"Slurm job {controller['slurm_job']}, " if controller["slurm_job"] else ""
        who = Text(f"Controller: {slurm}process {controller['pid']} on {controller['host']}, generation {controller['generation']}, "
                   f"seen {controller['heartbeat_seconds_ago']:.0f} s ago")
    elif record["done"]:
        who = Text("Finished: nothing is left to do.", "green")
    else:
        who = Text(f"No controller runs now (last: generation {controller['generation']}). `evo-hpc run` goes on.", "dim")
    versions = Table(box=None, header_style="bold", pad_edge=False)
    for name, kept in (("version", True), ("from", True), ("factors", False), ("steps", True), ("stage", True), ("dev Avg@k %", True),
                       ("probe Avg@k %", True)):
        versions.add_column(name, no_wrap=kept, overflow="fold")
    for v in record["versions"]:
        scores = [percent(v["evaluations"][s]["avg_at_k"]) if v["evaluations"].get(s) else "-" for s in ("dev", "probe")]
        mark = " *" if v["id"] == record["incumbent"] else ""
        versions.add_row(v["id"] + mark, ", ".join(v["parents"]) or "-", ", ".join(v["factors"]) or "-", str(v["steps"]), v["stage"], *scores)
    wish = record["control"]
    parts: list[RenderableType] = [head, who]
    if wish["problem"]:
        parts.append(Text(wish["problem"], "red"))
    elif wish["state"] != "run" or wish["cancel"]:
        asked = [*([wish["state"]] if wish["state"] != "run" else []), *([f"cancel {', '.join(wish['cancel'])}"] if wish["cancel"] else [])]
        parts.append(Text(f"control.yaml: {', '.join(asked)}{': ' + wish['reason'] if wish['reason'] else ''}", "yellow"))
    parts += [Text(), versions]
    if comparisons := [c for v in record["versions"] for c in v["comparisons"]]:
        parts += [Text(), *(Text.assemble((f"{c['version']}  ", "bold"), verdict(c)) for c in comparisons)]
        parts.append(Text(f"* {record['incumbent']} is the incumbent: what the next version must beat.", "dim"))
        parts.append(Text(f"Looks at dev: {record['looks']}, alpha spent {record['alpha_spent']:.4f} of {record['alpha']:.4f}", "dim"))
    if running := [j for j in record["jobs"] if j["state"] in LIVE]:
        parts += [Text(), jobs_view(running)]
    return Group(*parts)


def plan_record(plan: Plan) -> dict[str, Any]:
    """What a controller would do now."""
    return {
        "done": plan.done, "actions": [{"action": type(action).__name__, **_told(action)} for action in plan.actions],
        "running": [job_record(status) for status in plan.running],
        "waiting": [job_record(status) for status in plan.waiting], "blockers": [asdict(blocker) for blocker in plan.blockers],
    }


def _told(action: Action) -> dict[str, Any]:
    """An action in the few words that a person needs."""
    match action:
        case Submit():
            return {"owner": action.owner, "kind": action.kind, "attempt": action.attempt}
        case Start():
            return {"job": ", ".join(f"{each.job.owner.name}/{each.job.root.name}" for each in action.statuses)}
        case Publish():
            return {"version": action.version, "parts": len(action.shards)}
        case Commit() | GiveUp() | Stop() | Kill() | EndEarly():
            return {"job": f"{action.status.job.owner.name}/{action.status.job.root.name}"}
        case CreateVersion():
            return {"version": action.id, "parents": action.version.parents, "hypothesis": action.version.hypothesis}
        case Propose():
            return {"round": action.round.number, "versions": [p.version.id for p in action.round.proposals],
                    "hypotheses": [p.version.hypothesis for p in action.round.proposals]}
        case MakeTasks():
            return {}
        case MakeHarness():
            return {"number": action.number}
    return asdict(action)


def plan_view(record: dict[str, Any]) -> RenderableType:
    """The plan as lines."""
    record = printable(record)
    if record["done"]:
        return Text("Nothing is left to do.", "green")
    lines = [Text.assemble((f"{a['action']:14}", "bold"), ", ".join(f"{k} {v}" for k, v in a.items() if k != "action")) for a in record["actions"]]
    lines += [Text.assemble(("running       ", "bold cyan"), f"{j['owner']}/{j['job']}") for j in record["running"]]
    lines += [Text.assemble(("blocked       ", "bold red"), f"{b['what']}: {b['error']}") for b in record["blockers"]]
    return Group(Text("Next, in this order (what follows depends on how it comes out):", "dim"), *lines)


def analysis_view(record: dict[str, Any]) -> RenderableType:
    """Findings by version."""
    record = printable(record)
    parts: list[RenderableType] = []
    for version in record["versions"]:
        parts += [Text(version["version"], "bold"), *(_finding_line(f) for f in version["findings"])]
        if not version["findings"]:
            parts.append(Text("no findings", "dim"))
        measures = Table("measure", "value", "standard error", box=None, header_style="bold", pad_edge=False)
        for name, m in version["measures"].items():
            measures.add_row(name, *("-" if m[k] is None else f"{m[k]:.4g}" for k in ("value", "se")))
        parts += [measures, Text()]
    return Group(*parts)


def jobs_view(jobs: list[dict[str, Any]]) -> RenderableType:
    """Running jobs, one line each: stage, step, what it measures, time left."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for job in jobs:
        p = job.get("progress") or {}
        steps = f"{p['step']}/{p['steps']}" if p.get("steps") is not None and p.get("step") is not None else ""
        numbers = [f"{name} {p[name]:.3g}" for name in ("loss", "reward", "score") if p.get(name) is not None]
        if p.get("tokens_per_second"):
            numbers.append(f"{p['tokens_per_second']:,} tok/s")
        left = f"{p['seconds_left']:.0f} s left" if p.get("seconds_left") is not None else ""
        table.add_row(Text(f"{job['owner']} {job['kind']}", "cyan"), p.get("stage") or job["said"] or "starting", steps, "  ".join(numbers), left)
    return table


def version_view(record: dict[str, Any], params: list[dict[str, Any]]) -> RenderableType:
    """One version's page."""
    record, params = printable(record), printable(params)
    parts: list[RenderableType] = [Text.assemble((record["id"], "bold"), f"  {record['stage']}  ", (record["folder"], "dim"))]
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_row("parents", ", ".join(record["parents"]) or "none")
    facts.add_row("init", record["init"])
    facts.add_row("author", record["author"])
    if record["rule"]:
        facts.add_row("rule", record["rule"])
    facts.add_row("hypothesis", record["hypothesis"] or "-")
    if prediction := record["prediction"]:
        facts.add_row("prediction", f"{prediction['metric']} goes {prediction['direction']} by at least {prediction['by']:g}")
    if record["rollback"]:
        facts.add_row("rollback", record["rollback"])
    facts.add_row("factors", ", ".join(record["factors"]) or "-")
    for suite, e in record["evaluations"].items():
        shown = "not evaluated yet" if e is None else (
            f"Avg@{e['k']} {percent(e['avg_at_k'])} %, {e['tasks']} tasks, {e['rollouts']} rollouts, {e['missing']} missing, epoch {e['epoch']}")
        facts.add_row(suite, shown)
    parts.append(facts)
    parts += [verdict(c) for c in record["comparisons"]]
    if decision := record["decision"]:
        parts += [Text(), Text.assemble((f"{decision['decision']} (by {decision['by']})", "bold"), f"  {decision['because']}")]
        if checked := decision["prediction"]:
            parts.append(Text(f"prediction {checked['outcome']}: {checked['why']}"))
    for title, findings in (("Proposed from", record["evidence"]), ("Findings", record["findings"])):
        if findings:
            parts += [Text(), Text(title, "bold"), *(_finding_line(f) for f in findings)]
    if params:
        parts += [Text(), changes_view(params)]
    if record["jobs"]:
        jobs = Table("job", "state", "seconds", "error", box=None, header_style="bold", pad_edge=False)
        for j in record["jobs"]:
            jobs.add_row(j["job"], Text(j["state"], PHASE_STYLE.get(j["state"], "")), f"{j['seconds']:.0f}" if j.get("seconds") else "-", j.get("error") or "")
        parts += [Text(), jobs]
    return Group(*parts)


def _finding_line(finding: dict[str, Any]) -> Text:
    style = {"info": "dim", "warning": "yellow", "critical": "red"}[finding["severity"]]
    return Text.assemble((f"{finding.get('id') or finding['finding']} ", style), finding["text"])


def changes_view(changes: list[dict[str, Any]]) -> RenderableType:
    """Fields that differ, with the factor of each."""
    table = Table("field", "before", "after", "factor", box=None, header_style="bold", pad_edge=False)
    for c in changes:
        table.add_row(c["field"], *("-" if c[side] is None else str(c[side]) for side in ("before", "after")), c["factor"])
    return table
