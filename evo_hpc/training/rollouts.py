"""The trainer's side of the exchange: asks for the groups of a step, publishes policies, collects complete groups."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from evo_hpc.config.recipe import DataFilter, Recipe
from evo_hpc.domains.base import Task
from evo_hpc.errors import Failure, UserError
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.rollout.doorbell import SILENT, Doorbell
from evo_hpc.rollout.exchange import BatchRequest, GroupRequest, Probe, cancel, policy_meta, post_request, retire, wait_any
from evo_hpc.seeds import derive_seed, positions_for_step, refill_positions
from evo_hpc.store.atomic import temp_path
from evo_hpc.store.manifest import complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import read_table
from evo_hpc.training import parallel
from evo_hpc.training.packing import Sample
from evo_hpc.training.policy import Policy
from evo_hpc.training.schedule import GroupName, Schedule

TOLERANCE = {"float32": (1e-3, False), "bfloat16": (0.2, True)}
"""Nats between trainer and engine, on the worst token or by the mean. Other weights are nats away. In bfloat16 single tokens may be
one nat off, where experts are chosen by rounding, and the mean stays below a tenth."""
Rows = list[dict[str, Any]]
T = TypeVar("T")


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
    """Groups of rollouts for each step, asked for max_staleness steps ahead.

    Every rank calls every method; the first one speaks with the workers and tells the others what came.
    """

    context: RoleContext
    recipe: Recipe
    tasks: list[Task]
    tokenizer_from: Path
    bell: Doorbell = SILENT
    schedule: Schedule = field(init=False)
    _asked_to: int = field(init=False)
    """The newest step whose groups are asked for."""
    _refilled: int = 0
    """Groups that the current step has asked for beyond its own."""
    _rows: dict[GroupName, Rows] = field(default_factory=dict)
    """Of complete groups that no step has taken."""
    _cancelled: list[int] = field(default_factory=list)
    """Batches whose files are removed a step later."""
    _counted: dict[str, float] = field(default_factory=dict)

    def begin(self, step: int, carried: Sequence[str] = ()) -> None:
        """Get going after `step`, whose weights are published, with what an earlier incarnation had asked for and not learned from."""
        self.schedule, self._asked_to = Schedule(self.recipe.rollout, step), step
        if step < self.recipe.steps:
            self._ask([GroupName.parse(text) for text in carried], step)
            self.request(step)

    def request(self, published: int) -> None:
        """Ask for the groups of the steps that can be, now that the weights of step `published` are there.

        Tasks and seeds are functions of (seed, step, index), so a resumed run asks for the same.
        """
        for step in range(self._asked_to + 1, min(self.schedule.posted_by(published), self.recipe.steps) + 1):
            names = [GroupName(step, index) for index in range(self.recipe.rollout.groups_asked)]
            self._ask(names, self.schedule.weights_for(step))
            self._asked_to = step

    def publish(self, policy: Policy, step: int, probe_ids: list[int]) -> None:
        """Make the weights after `step` visible to the workers as a whole, with a probe that proves the reload."""
        folder = self.context.exchange.policy(step)
        temp = parallel.gather_objects(temp_path(folder))[0]
        policy.save_hf(temp, tokenizer_from=self.tokenizer_from)
        probe = probe_of(policy, probe_ids)
        if not parallel.is_main():
            return
        complete(temp, policy_meta(step, probe))
        temp.rename(folder)
        self.bell.ring(folder)
        oldest = Schedule(self.recipe.rollout, step).oldest_needed(step) - 1  # one more than is needed: a worker may just be reading it
        for version in self.context.exchange.policies():
            if version < oldest:
                self.bell.forget(self.context.exchange.policy(version))
                shutil.rmtree(self.context.exchange.policy(version), ignore_errors=True)
                for seen in self.context.exchange.all_seen(version):
                    seen.unlink(missing_ok=True)

    def collect(self, step: int) -> Rows:
        """The rollouts that a step begins with, whole groups in order; those that it leaves are carried or dropped.

        Raises Failure on rows of other weights than were asked for.
        """
        chosen: list[GroupName] = []
        self._refilled = 0

        def enough() -> bool:
            chosen[:] = self.schedule.choose(step) or []
            return bool(chosen)

        return self._on_main(lambda: self._gather(step, enough) or self._begin(step, chosen))

    def refill(self, step: int, more: int) -> Rows:
        """As many more groups of a step as were left out, sampled with the weights that its own were asked for with."""
        start = self.recipe.rollout.groups_asked + self._refilled
        names = [GroupName(step, index) for index in range(start, start + more)]
        self._refilled += more
        self._ask(names, self.schedule.weights_for(step))
        return self._on_main(lambda: self._gather(step, lambda: all(n in self.schedule.arrived for n in names)) or self._take(step, names))

    def counts(self) -> dict[str, float]:
        """Of the groups of the step that was collected last: late ones, carried ones, dropped ones, refilled ones."""
        return {**self._counted, "groups_refilled": float(self._refilled)}

    def manifest(self, step: int) -> list[str]:
        """Names of the groups that were asked for by `step` or before it, and neither learned from nor dropped."""
        return [str(name) for name in self.schedule.carried(step)]

    def reload_error(self, rows: Rows) -> float:
        """How far the engines' log-probabilities were from the trainer's, at most, when they took the weights of `rows`, in nats."""
        seen = [path for version in {row["weight_version"] for row in rows} for path in self.context.exchange.all_seen(version)]
        return max((float(path.read_text()) for path in seen), default=math.nan)

    def _ask(self, names: Sequence[GroupName], weight_version: int) -> None:
        if not parallel.is_main():
            return
        engine, rollout = self.context.cluster.engine, self.recipe.rollout
        size = engine.batch_groups or -(-rollout.groups_asked // engine.workers)
        seeds = (self.context.campaign.seed, self.recipe.seed, self.context.spec.owner)
        for asked in self.schedule.ask(names, weight_version, size):
            request = BatchRequest(
                number=asked.number, step=asked.groups[0].step, weight_version=weight_version, newest=rollout.weights == "newest",
                groups=[self._group(name, seeds) for name in asked.groups],
            )
            post_request(self.context.exchange, request, self.bell)

    def _group(self, name: GroupName, seeds: tuple[int, int, str]) -> GroupRequest:
        own, count = self.recipe.rollout.groups_asked, len(self.tasks)
        if name.index < own:
            position = positions_for_step(count, own, name.step, *seeds[:2])[name.index]
        else:
            [position] = refill_positions(count, own, name.step, name.index, 1, *seeds[:2])
        return GroupRequest(
            group_id=str(name), task_id=self.tasks[position].task_id,
            seeds=[derive_seed(*seeds, "rollout", name.step, name.index, sample) for sample in range(self.recipe.rollout.group_size)],
        )

    def _gather(self, step: int, enough: Callable[[], bool]) -> None:
        """Read answers until there are enough."""
        while not enough():
            paths = {self.context.exchange.rollouts(number): number for number in self.schedule.open(step)}
            for path in wait_any(list(paths), self.context.raise_if_stopped, self.bell):
                self._read(path, paths[path])

    def _read(self, path: Path, number: int) -> None:
        asked, groups = self.schedule.batches[number], dict[GroupName, Rows]()
        for row in read_table(path, ROLLOUT).to_pylist():
            groups.setdefault(GroupName.parse(row["group_id"]), []).append(row)
        versions = {name: {row["weight_version"] for row in rows} for name, rows in groups.items()}
        newest, size = self.recipe.rollout.weights == "newest", self.recipe.rollout.group_size
        right = all(len(found) == 1 if newest else found == {asked.weight_version} for found in versions.values())
        sizes = {len(rows) for rows in groups.values()}
        if not right or set(groups) != set(asked.groups) or sizes != {size}:
            found = sorted(set().union(*versions.values()))
            raise Failure(f"{path}: groups {[str(name) for name in groups]} of {sorted(sizes)} rollouts of weights {found}; "
                          f"expected {[str(name) for name in asked.groups]} of {size} rollouts of weights {asked.weight_version}")
        self.schedule.answer(number, {name: min(found) for name, found in versions.items()})
        self._rows |= {name: rows for name, rows in groups.items() if name in self.schedule.arrived}
        retire(self.context.exchange, number, self.bell)

    def _begin(self, step: int, chosen: list[GroupName]) -> Rows:
        """Take the groups that a step begins with, and carry or drop the others."""
        rows = self._take(step, chosen)
        rest = self.schedule.settle(step)
        for number in self._cancelled:
            retire(self.context.exchange, number, self.bell)
        for number in rest.over:
            cancel(self.context.exchange, number, self.bell)
        self._cancelled = rest.over
        for name in rest.dropped:
            self._rows.pop(name, None)
        self._counted = {
            "groups_late": float(rest.late), "groups_dropped_late": float(len(rest.dropped)),
            "groups_carried": float(sum(name.step < step for name in chosen)),
        }
        return rows

    def _take(self, step: int, names: Iterable[GroupName]) -> Rows:
        rows: Rows = []
        for name in names:
            stale = self.schedule.staleness(name, step)
            assert 0 <= stale <= self.recipe.rollout.max_staleness, f"group {name} would be {stale} steps old at step {step}"
            for row in self._rows.pop(name):
                row.update(trainer_step=step, staleness=stale)
                rows.append(row)
        self.schedule.take(list(names))
        return rows

    def _on_main(self, work: Callable[[], T]) -> T:
        """What `work` gives on the first rank, on all; a stop there, too, so that no rank waits for one that has left."""
        done: tuple[T | None, str | None] = (None, None)
        if parallel.is_main():
            try:
                done = (work(), None)
            except Stopped as stopped:
                done = (None, str(stopped))
        value, stopped_because = parallel.gather_objects(done)[0]
        if stopped_because is not None:
            raise Stopped(stopped_because)
        return value  # type: ignore[return-value]


def probe_of(policy: Policy, token_ids: list[int]) -> Probe:
    """The trainer's own log-probabilities of a sequence, at temperature 1."""
    sample = Sample(token_ids=token_ids, loss_mask=[0] * len(token_ids))
    return Probe.of(token_ids, policy.logprobs([sample], temperature=1.0)[0], *TOLERANCE[str(policy.dtype).removeprefix("torch.")])
