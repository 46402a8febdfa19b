"""The analysis job: all analyzers of a harness on one finished version, where the profile gives that a job of its own."""

from __future__ import annotations

from typing import Any

from evo_hpc.config.base import Config
from evo_hpc.errors import UserError
from evo_hpc.harness.analysis import make_analysis, version_inputs
from evo_hpc.harness.harness import read_harnesses
from evo_hpc.jobs.context import RoleContext


class AnalyseParams(Config):
    """What an analysis job's spec holds."""

    harness: str
    digest: str
    """Of that harness when the job was asked for."""


def run(context: RoleContext) -> dict[str, Any]:
    """Entry point of the analyst role. Raises BadAnalyzer, BadInputs and BadAnalysis, which are the user's to mend."""
    params, paths = AnalyseParams.model_validate(context.spec.params), context.campaign_paths
    harness = next((each for each in read_harnesses(paths) if each.id == params.harness), None)
    if harness is None or harness.digest != params.digest:
        raise UserError(f"{paths.root}: harness {params.harness} is no longer the one that this analysis was asked for; run the controller again")
    version, folder = paths.version(context.spec.owner), context.incarnation.analysis

    def beat() -> None:
        context.raise_if_stopped()
        context.progress(stage="analysing", harness=harness.id)

    beat()
    make_analysis(version, harness, version_inputs(version), folder, while_waiting=beat)
    context.check_claim()
    return {"harness": harness.id, "folder": context.relative(folder)}
