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
