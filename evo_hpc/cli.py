"""`evo-hpc`. Commands import what they need when they run, so that --help answers at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from evo_hpc.errors import EvoError, UserError

if TYPE_CHECKING:
    from evo_hpc.controller.state import CampaignState
    from evo_hpc.paths import CampaignPaths

app = typer.Typer(
    name="evo-hpc", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="RL campaigns on language models: train, evaluate, compare. Exit codes: 0 fine, 1 failure, 2 yours to mend.",
)

CampaignArgument = Annotated[Path, typer.Argument(metavar="CAMPAIGN", help="Folder of the campaign.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _paths(campaign: Path) -> CampaignPaths:
    from evo_hpc.paths import CampaignPaths

    return CampaignPaths(Path(os.path.normpath(campaign.absolute())))


def _state(campaign: Path) -> CampaignState:
    from evo_hpc.controller.state import read_state

    return read_state(_paths(campaign))


def _print(as_json: bool, record: Any, view: Any) -> None:
    """The record for scripts, or the view for people."""
    if as_json:
        print(json.dumps(record, indent=1, sort_keys=True, default=str))
    else:
        from rich.console import Console

        shown = view() if callable(view) else view
        console = Console(highlight=False, markup=False)
        if not console.is_terminal:  # a file or a pipe has no edge to wrap at
            console = Console(highlight=False, markup=False, width=max(160, console.width))
        console.print(shown, soft_wrap=isinstance(shown, str))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False) -> None:
    if version:
        from evo_hpc import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def demo(
    workspace: Annotated[Path, typer.Option(help="Folder for the demo campaign; made if absent.")] = Path("workspace"),
    as_json: JsonOption = False,
) -> None:
    """Run the demo campaign on this machine, claim on sealed, write the report; or go on with it."""
    from evo_hpc.controller.skeleton import copy_campaign

    campaign = copy_campaign("demo", workspace.absolute())
    _run(campaign, False, None, as_json, then=lambda: _claim_and_report(campaign, quiet=as_json))


@app.command()
def run(
    campaign: CampaignArgument,
    take_over: Annotated[bool, typer.Option("--take-over", help="Displace a controller on another host that you know is dead.")] = False,
    until: Annotated[str | None, typer.Option(metavar="VERSION", help="Stop when this version is decided, e.g. v0002.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done now, and do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a campaign until it is done; again after a stop to go on."""
    if until is not None:
        from evo_hpc.paths import VERSION_ID

        if not VERSION_ID.match(until):
            raise UserError(f"--until {until}: not a version's name; write it like v0002")
    if dry_run:
        from evo_hpc.controller.names import check_names
        from evo_hpc.controller.plan import make_plan
        from evo_hpc.report.views import plan_record, plan_view

        state = _state(campaign)
        check_names(state)
        record = plan_record(make_plan(state, 0, until))
        _print(as_json, record, lambda: plan_view(record))
    else:
        _run(campaign, take_over, until, as_json)


def _claim_and_report(campaign: Path, quiet: bool) -> str:
    """What `demo` does once its campaign is done; in words."""
    from evo_hpc.controller.finalize import FinalRefused, describe
    from evo_hpc.report.html import write_report

    try:
        claim = describe(_finalize(_paths(campaign), None, quiet))
    except FinalRefused as error:  # nothing was promoted: an outcome, too
        claim = f"No claim: {error}"
    write_report(_paths(campaign), None)
    return f"{claim}\nReport: {_paths(campaign).report_html}"


def _finalize(paths: CampaignPaths, again: str | None, quiet: bool) -> Any:
    from rich.console import Console

    from evo_hpc.controller.finalize import finalize
    from evo_hpc.report.live import LiveView

    with LiveView(Console(highlight=False, markup=False, stderr=quiet)) as view:
        return finalize(paths, again=again, watch=view)


def _run(campaign: Path, take_over: bool, until: str | None, as_json: bool, then: Callable[[], str] | None = None) -> None:
    from rich.console import Console

    from evo_hpc.controller.loop import Controller
    from evo_hpc.report.live import LiveView
    from evo_hpc.report.views import status_record, status_view

    paths = _paths(campaign)
    with LiveView(Console(highlight=False, markup=False, stderr=as_json)) as view:
        state = Controller(paths, view, take_over=take_over, until=until).run()
    told = then() if then else ""
    record = status_record(state)

    def shown() -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(Text(), status_view(record), Text(), Text(told), Text(f"Everything is in {paths.root}", "bold"))

    _print(as_json, record, shown)


@app.command()
def launch(
    campaign: CampaignArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show every batch script that would be submitted, and do nothing.")] = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="Displace a controller on another host that you know is dead.")] = False,
    until: Annotated[str | None, typer.Option(metavar="VERSION", help="Stop when this version is decided, e.g. v0002.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Submit the controller of a campaign to Slurm, as cluster.yaml says; it goes on over time limits and preemptions."""
    from evo_hpc.controller import launch as launching

    paths = _paths(campaign)
    if dry_run:
        scripts = launching.dry_run(paths, take_over=take_over, until=until)
        record: Any = {"scripts": [{"name": each.name, "path": str(each.path), "text": each.text} for each in scripts]}
        _print(as_json, record, "\n".join(f"# {each.path}\n{each.text}" for each in scripts))
        return
    done = launching.launch(paths, take_over=take_over, until=until)
    record = {"job_id": done.job_id, "name": done.record.slurm_name, "script": str(done.script), "log": str(done.log), "note": done.note}
    said = f"The controller is Slurm job {done.job_id} ({done.record.slurm_name}). Its log: {done.log}"
    _print(as_json, record, f"{said}\n{done.note}" if done.note else said)


@app.command()
def stop(
    campaign: CampaignArgument,
    now: Annotated[bool, typer.Option("--now", help="Have jobs save and end now, rather than come to their end.")] = False,
    reason: Annotated[str | None, typer.Option(help="Why, for people.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Have the controller end: nothing new is submitted, jobs come to their end and are committed."""
    _wish(campaign, "stop" if now else "drain", reason, as_json)


@app.command()
def pause(campaign: CampaignArgument, reason: Annotated[str | None, typer.Option(help="Why, for people.")] = None, as_json: JsonOption = False) -> None:
    """Have the controller submit nothing new; jobs go on, and so does the controller."""
    _wish(campaign, "pause", reason, as_json)


@app.command()
def resume(campaign: CampaignArgument, as_json: JsonOption = False) -> None:
    """Undo `stop` and `pause`: a controller that runs goes on; where there is none and jobs go to Slurm, one is launched."""
    _wish(campaign, "run", None, as_json, go_on=True)


def _wish(campaign: Path, state: str, reason: str | None, as_json: bool, go_on: bool = False) -> None:
    """Write control.yaml, and say what will come of it."""
    import shlex

    from evo_hpc.controller.control import write_control
    from evo_hpc.controller.launch import ControllerLives
    from evo_hpc.controller.launch import launch as launch_controller
    from evo_hpc.controller.settings import load_settings
    from evo_hpc.report.views import controller_record

    paths = _paths(campaign)
    settings = load_settings(paths)
    write_control(paths, state=state, reason=reason)
    controller, job_id = controller_record(paths), None
    lives = controller is not None and controller["running"]
    if go_on and not lives and settings.cluster.executor == "slurm":
        try:
            job_id = launch_controller(paths).job_id
        except ControllerLives:  # it waits in the queue
            lives = True
    then = {
        "run": "it goes on", "pause": "it submits nothing new", "drain": "it ends once its jobs have ended", "stop": "its jobs save and end, then it does",
    }[state]
    if job_id is not None:
        said = f"A controller was launched: Slurm job {job_id}. Its log: {paths.controller_log}"
    elif lives:
        said = f"The controller looks at {paths.control_yaml} within seconds: {then}. Watch it with `evo-hpc status {shlex.quote(str(paths.root))}`."
    else:
        said = f"No controller runs. {paths.control_yaml} says `state: {state}`; " + (
            f"run `evo-hpc run {shlex.quote(str(paths.root))}` to go on." if go_on else "the next one does as it says."
        )
    _print(as_json, {"state": state, "file": str(paths.control_yaml), "controller": controller, "launched": job_id}, said)


@app.command()
def doctor(
    campaign: Annotated[Path | None, typer.Argument(metavar="[CAMPAIGN]", help="Folder of a campaign; left out: this machine alone.")] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Also check cluster.yaml against the live Slurm cluster, and the mount across its nodes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what will fail before anything is queued."""
    from evo_hpc.config.cluster import Cluster
    from evo_hpc.controller import doctor as checks
    from evo_hpc.controller.settings import load_settings

    paths = _paths(campaign) if campaign is not None else None
    profile = load_settings(paths).cluster if paths is not None else Cluster()
    results = checks.doctor(paths, profile, cluster_checks=cluster)
    _print(as_json, checks.record(results), lambda: checks.view(results))
    if code := checks.exit_code(results):
        raise typer.Exit(code)


@app.command()
def cost(campaign: CampaignArgument, as_json: JsonOption = False) -> None:
    """Show what the campaign has used, by version and kind of work: GPU hours, node hours, hours of jobs, and how much was of use."""
    from evo_hpc.controller.books import accounted_now
    from evo_hpc.report.cost_view import cost_record, cost_view

    paths = _paths(campaign)
    record = cost_record(paths, accounted_now(_state(campaign)))
    _print(as_json, record, lambda: cost_view(record))


@app.command()
def status(campaign: CampaignArgument, as_json: JsonOption = False) -> None:
    """Show versions, scores and running jobs."""
    from evo_hpc.report.views import status_record, status_view

    record = status_record(_state(campaign))
    _print(as_json, record, lambda: status_view(record))


@app.command()
def show(campaign: CampaignArgument, version: Annotated[str, typer.Argument(metavar="VERSION", help="E.g. v0001.")], as_json: JsonOption = False) -> None:
    """Show one version: origin, changes, scores, jobs."""
    from evo_hpc.report.views import version_record, version_view

    state = _state(campaign)
    found = state.named(version)
    version = found.id
    record = version_record(state, found)
    parents = found.node.version.parents
    record["changes"] = _changes(state, parents[0], version) if parents else []
    _print(as_json, record, lambda: version_view(record, record["changes"]))


@app.command()
def diff(
    campaign: CampaignArgument,
    before: Annotated[str, typer.Argument(metavar="A", help="E.g. v0000.")],
    after: Annotated[str, typer.Argument(metavar="B", help="E.g. v0001.")],
    as_json: JsonOption = False,
) -> None:
    """Show what version B changes against version A."""
    from evo_hpc.report.views import changes_view

    state = _state(campaign)
    found = _changes(state, before, after)
    record = {"before": before, "after": after, "changes": found, "factors": sorted({c["factor"] for c in found})}
    _print(as_json, record, lambda: changes_view(found) if found else f"{before} and {after} have the same recipe.")


@app.command()
def lineage(campaign: CampaignArgument, as_json: JsonOption = False) -> None:
    """Show the tree of versions with verdicts, scores and changes."""
    from evo_hpc.report.lineage_view import lineage_record, lineage_view
    from evo_hpc.report.record import read_report_record

    report = read_report_record(_paths(campaign))
    _print(as_json, lineage_record(report), lambda: lineage_view(report))


@app.command()
def analyze(
    campaign: CampaignArgument,
    version: Annotated[str | None, typer.Argument(metavar="VERSION", help="E.g. v0001; left out: every version that can be analysed.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the analyzers as they lie on disk now, and show what they find; writes nothing."""
    from evo_hpc.controller.analyse import analyse_now
    from evo_hpc.report.views import analysis_view

    record = analyse_now(_state(campaign), version)
    _print(as_json, record, lambda: analysis_view(record))


@app.command()
def finalize(
    campaign: CampaignArgument,
    again: Annotated[str | None, typer.Option(metavar="REASON", help="Read sealed once more for another version; the reason is recorded.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Score the incumbent and the base policy on sealed, once, and state the claim."""
    from evo_hpc.controller.finalize import describe

    result = _finalize(_paths(campaign), again, as_json)
    _print(as_json, result.model_dump(mode="json"), lambda: describe(result))


@app.command()
def report(
    campaign: CampaignArgument,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; left out: reports/ of the campaign.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the report: one HTML file that needs nothing else, and Markdown with the same numbers."""
    from evo_hpc.report.html import write_report

    paths = _paths(campaign)
    found = write_report(paths, out)
    folder = out or paths.reports
    _print(as_json, found.record(), f"{folder / paths.report_html.name}\n{folder / paths.report_markdown.name}")


@app.command()
def export(
    tracker: Annotated[str, typer.Argument(metavar="tensorboard|wandb|trackio", help="Where to.")],
    campaign: CampaignArgument,
    versions: Annotated[list[str] | None, typer.Argument(metavar="[VERSION ...]", help="E.g. v0001; left out: every version that has metrics.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tracker's files; left out: exports/ of the campaign, or the tracker's own place.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Hand the metrics of training runs to a tracker, also while they run; again to bring it up to date."""
    from evo_hpc.report.export.export import export as export_runs
    from evo_hpc.report.export.export import export_text, tracker_named

    record = export_runs(_state(campaign), tracker_named(tracker), versions or [], out.absolute() if out else None)
    _print(as_json, record, lambda: export_text(record))


@app.command()
def validate(campaign: CampaignArgument, as_json: JsonOption = False) -> None:
    """Check a campaign's settings, tree and published folders."""
    from evo_hpc.controller.validate import find_problems

    problems = find_problems(_paths(campaign))
    record = {"campaign": str(campaign), "problems": problems, "valid": not problems}
    _print(as_json, record, "\n".join(problems) if problems else f"{campaign}: no problems found.")
    if problems:
        raise typer.Exit(2)


def _changes(state: CampaignState, before: str, after: str) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from evo_hpc.lineage.tree import node_changes

    return [asdict(change) for change in node_changes(state.named(before).node, state.named(after).node)]


def main() -> None:
    """Console entry point: every error of ours becomes one message on stderr and the right exit code."""
    try:
        app()
    except EvoError as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # `evo-hpc status | head`
        sys.stderr.close()
        sys.exit(0)
    except PermissionError as error:
        _fail(f"{error.filename}: {error.strerror}. Check the owner and mode of it and of the folders above", 2)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror}", 1)


def _fail(message: str, exit_code: int) -> NoReturn:
    """One message on stderr, and for scripts that asked for it one JSON object on stdout."""
    print(f"evo-hpc: {message}", file=sys.stderr)
    if "--json" in sys.argv:
        print(json.dumps({"error": message, "exit_code": exit_code}))
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
