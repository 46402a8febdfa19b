"""The trainer's side of the exchange: asks for the groups of a step, publishes policies, collects complete groups."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from evo_hpc.config.recipe import DataFilter, Recipe
from evo_hpc.domains.base import Task
from evo_hpc.errors import Failure, UserError
from evo_hpc.jobs.context import RoleContext
from evo_hpc.rollout.exchange import GroupRequest, Probe, StepRequest, policy_meta, post_request, wait_for
from evo_hpc.seeds import derive_seed, positions_for_step
from evo_hpc.store.atomic import temp_path
from evo_hpc.store.manifest import complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_table
from evo_hpc.training.packing import Sample
from evo_hpc.training.policy import Policy


def select_tasks(tasks: list[Task], data_filter: DataFilter) -> list[Task]:
    """The training tasks that the recipe's difficulty band lets through. Raises UserError when it names no task."""
    chosen = [
        task for task in tasks
        if all(task.attributes.get(name) in values for name, values in data_filter.difficulty.items())
    ]
    if not chosen:
        names = sorted({name for task in tasks for name in task.attributes})
        raise UserError(f"data_filter.difficulty {dict(data_filter.difficulty)} leaves none of {len(tasks)} training tasks; "
                        f"attributes of these tasks: {', '.join(names)}")
    return chosen


@dataclass
class RolloutSource:
    """Rollouts of step t, sampled with the weights of step t - 1 (synchronous)."""

    context: RoleContext
    recipe: Recipe
    tasks: list[Task]
    tokenizer_from: Path

    def request(self, step: int) -> None:
        """Ask for a step's groups. Tasks and seeds are functions of (seed, step), so a resumed run asks for the same."""
        seeds = (self.context.campaign.seed, self.recipe.seed, self.context.spec.owner)
        size = self.recipe.rollout.group_size
        chosen = positions_for_step(len(self.tasks), self.recipe.rollout.prompts_per_step, step, *seeds[:2])
        batch = [
            GroupRequest(
                group_id=f"{step:06d}-{index:04d}", task_id=self.tasks[position].task_id,
                seeds=[derive_seed(*seeds, "rollout", step, index, sample) for sample in range(size)],
            )
            for index, position in enumerate(chosen)
        ]
        post_request(self.context.exchange, StepRequest(step=step, weight_version=step - 1, batches=[batch]))

    def publish(self, policy: Policy, step: int, probe_ids: list[int]) -> None:
        """Make the weights after `step` visible to the workers as a whole, with a probe that proves the reload."""
        folder = self.context.exchange.policy(step)
        temp = temp_path(folder)
        policy.save_hf(temp, tokenizer_from=self.tokenizer_from)
        complete(temp, policy_meta(step, probe_of(policy, probe_ids)))
        temp.rename(folder)
        shutil.rmtree(self.context.exchange.policy(step - 2), ignore_errors=True)
        self.context.exchange.seen(step - 2).unlink(missing_ok=True)

    def collect(self, step: int) -> pa.Table:
        """All rollouts of a step, complete or not at all. Raises Failure on rows of other weights."""
        path = self.context.exchange.rollouts(step, 0)
        wait_for(path.exists, self.context.raise_if_stopped)
        table = read_table(path, ROLLOUT)
        versions = set(table.column("weight_version").to_pylist())
        expected = self.recipe.rollout.prompts_per_step * self.recipe.rollout.group_size
        if versions != {step - 1} or len(table) != expected:
            raise Failure(f"{path}: {len(table)} rollouts of weights {sorted(versions)}; expected {expected} of {step - 1}")
        for done in (path, self.context.exchange.request(step - 1), self.context.exchange.claim(step - 1, 0)):
            done.unlink(missing_ok=True)
        return table

    def reload_error(self, weight_version: int) -> float:
        """How far the engine's log-probabilities were from the trainer's when it took these weights, in nats."""
        seen = self.context.exchange.seen(weight_version)
        return float(seen.read_text()) if seen.exists() else float("nan")


def probe_of(policy: Policy, token_ids: list[int]) -> Probe:
    """The trainer's own log-probabilities of a sequence, at temperature 1."""
    sample = Sample(token_ids=token_ids, loss_mask=[0] * len(token_ids))
    return Probe.of(token_ids, policy.logprobs([sample], temperature=1.0)[0])


def as_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows that scoring may write to."""
    return table.to_pylist()
