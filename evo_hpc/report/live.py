"""Progress of a running controller: a live block on a terminal, plain lines elsewhere; never silent for long."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from evo_hpc.controller.act import Event
from evo_hpc.controller.actions import Plan
from evo_hpc.controller.state import CampaignState
from evo_hpc.report.views import job_record, jobs_view, printable

_LINE_SECONDS = 10.0


def describe(event: Event) -> Text | None:
    """One event in words; None for those that nobody needs to see."""
    match event["event"]:
        case "MakeTasks":
            return Text(f"tasks made: {', '.join(f'{n} {s}' for s, n in event['tasks'].items())}")
        case "CreateVersion":
            rule = f" by rule {event['rule']}" if event["rule"] else ""
            return Text.assemble(f"{event['version']} created from {', '.join(event['parents']) or 'nothing'}{rule}: ", (event["hypothesis"], "italic"))
        case "MakeHarness":
            return Text(f"harness {event['harness']} made")
        case "Start":
            return Text(f"{event['job']} started ({event['said']})")
        case "Publish":
            return Text(f"{event['version']}: {event['parts']} parts of its evaluation put together", "green")
        case "Commit":
            return Text(f"{event['job']} done" + (f" in {event['seconds']:.0f} s" if event.get("seconds") else ""), "green")
        case "GiveUp":
            return Text(f"{event['job']} failed: {event['error']}", "red")
        case "Watch":
            found = [f"{f['id']} ({f['severity']})" for f in event["findings"] if f["severity"] != "info"]
            return Text(f"{event['version']} watched at step {event['step']}: {', '.join(found) or 'nothing alarming'}", "yellow" if found else "dim")
        case "Kill":
            return Text(f"{event['job']} killed: {event['why']}", "red")
        case "Stop":
            return Text(f"{event['job']} {event.get('why') or 'told to stop by the futility rule'}", "red")
        case "Trouble":
            return Text(event["error"], "yellow")
        case "EndEarly":
            return Text(f"{event['version']} stopped early at step {event['step']}: {', '.join(event['futile'])}", "red")
        case "Analyse":
            found = [f["id"] for f in event["findings"]]
            return Text(f"{event['version']} analysed by {event['harness']} in {event['seconds']:.1f} s: {', '.join(found) or 'no findings'}")
        case "Decide":
            style = {"keep": "bold green", "merge": "bold green", "prune": "bold yellow", "revert": "bold red"}[event["decision"]]
            checked = f" Prediction: {event['prediction']}." if event["prediction"] else ""
            return Text.assemble((f"{event['version']}: {event['decision']}", style), f". {event['because']}{checked}")
        case "Cancel":
            return Text(f"{event['version']}: {event['because']}", "bold yellow")
        case "Propose":
            return Text(f"round {event['round']}: " + (f"proposes {', '.join(event['versions'])}" if event["versions"] else "nothing left to propose"))
        case "Compare":
            return Text(f"{event['version']} compared with {event['against']} on dev: {100 * event['difference']:+.1f} points "
                        f"[{100 * event['ci_low']:+.1f}, {100 * event['ci_high']:+.1f}], n = {event['n_tasks']}", "bold")
    return None


class LiveView:
    """A watcher for Controller; use as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.time()
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._last_line = 0.0
        self._last_text = ""

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, state: CampaignState, plan: Plan, events: list[Event]) -> None:
        for event in events:
            if (text := describe(printable(event))) is not None:
                self.console.print(Text.assemble((f"{self._elapsed()} ", "dim"), text), soft_wrap=True)
        due = bool(plan.running) and time.time() - self._last_line > _LINE_SECONDS
        if not self._live and not due:
            return  # what each job says of itself is a file to be read
        jobs = [job_record(status) for status in plan.running]
        if self._live:
            self._live.update(Group(jobs_view(jobs), Text(f"{self._elapsed()} elapsed", "dim")))
        else:
            self._last_line = time.time()
            self.console.print(f"{self._elapsed()} " + "; ".join(_line(job) for job in jobs), soft_wrap=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.time() - self.started), 60)
        return f"{minutes:02d}:{seconds:02d}"


def _line(job: dict[str, Any]) -> str:
    p = job.get("progress") or {}
    words = [f"{job['owner']} {p.get('stage') or job['said'] or 'starting'}"]
    if p.get("steps") is not None and p.get("step") is not None:
        words.append(f"{p['step']}/{p['steps']}")
    words += [f"{name} {p[name]:.3g}" for name in ("loss", "reward", "score") if p.get(name) is not None]
    if p.get("tokens_per_second"):
        words.append(f"{p['tokens_per_second']} tok/s")
    if p.get("seconds_left") is not None:
        words.append(f"{p['seconds_left']:.0f} s left")
    return " ".join(words)
