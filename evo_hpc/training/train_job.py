"""The trainer role of a training job: GRPO on Megatron, rollouts from the worker, checkpoints, records."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field

from evo_hpc.config.base import Config
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import dump_tree
from evo_hpc.domains.base import read_tasks
from evo_hpc.jobs.context import RoleContext, Stopped
from evo_hpc.jobs.spec import load_spec
from evo_hpc.paths import IncarnationPaths, OwnerPaths, step_of
from evo_hpc.rollout.doorbell import Doorbell
from evo_hpc.rollout.exchange import policy_meta
from evo_hpc.store.atomic import write_bytes
from evo_hpc.store.manifest import complete
from evo_hpc.store.schemas import ROLLOUT
from evo_hpc.store.tables import table_of
from evo_hpc.training import checkpoint, parallel, retention
from evo_hpc.training.filters import SpreadMemory
from evo_hpc.training.groups import ScoredBatch, score_groups
from evo_hpc.training.learner import LOSS_FIELDS, Clock, Learner
from evo_hpc.training.optimizer import Optimizer
from evo_hpc.training.policy import Policy
from evo_hpc.training.recorder import Recorder
from evo_hpc.training.rollouts import RolloutSource, Rows, probe_of, select_tasks

FLUSH_STEPS = 10
"""Steps in one Parquet part, at most; parts also end at checkpoints."""


class TrainParams(Config):
    """What a training job's spec holds."""

    recipe: dict[str, Any]
    run: str
    """Identity of the run (lineage/identity.py): only checkpoints of this very run are resumed from."""
    init: str = Field(min_length=1)
    """Policy folder that training starts from, relative to the campaign."""


class TrainingRun:
    """One incarnation of a training run."""

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        params = TrainParams.model_validate(context.spec.params)
        self.recipe = Recipe.model_validate(params.recipe)
        self.run_identity = params.run
        self.init = context.resolve(params.init)
        context.progress(stage="loading", step=0, steps=self.recipe.steps)
        parallel.set_num_threads(context.cluster.trainer.threads)
        layout = parallel.initialize(self.recipe.compute, seed=self.recipe.seed)
        self.policy = Policy.from_hf(self.init, trainable=True, token_budget=self.recipe.token_budget, compute=self.recipe.compute)
        self.optimizer = Optimizer(self.policy, self.recipe.optimizer)
        self.reference = (
            Policy.from_hf(self.init, trainable=False, token_budget=self.recipe.token_budget, compute=self.recipe.compute)
            if self.recipe.optimizer.kl_coef else None
        )
        self.learner = Learner(self.policy, self.optimizer, self.reference, self.recipe)
        tasks = select_tasks(read_tasks(context.campaign_paths.tasks("train")), self.recipe.data_filter)
        bell = Doorbell.connect(context.exchange, context.role) if parallel.is_main() else Doorbell()
        self.source = RolloutSource(context, self.recipe, tasks, self.init, bell)
        self.memory = SpreadMemory()
        self.carried: list[str] = []
        self.step, parts = self._resume()
        self.recorder = Recorder(context, parts, FLUSH_STEPS)
        self.probe_ids: list[int] = []
        self._seconds: list[float] = []
        self._saved_at = time.monotonic()
        self._saving: checkpoint.PendingSave | None = None
        loss = self.recipe.optimizer
        effective = {
            **self.policy.effective_config(), "optimizer": self.optimizer.effective_config(),
            # What the step itself passes on to the loss, beside what was built.
            "loss": {name: getattr(loss, name) for name in LOSS_FIELDS},
            "reference": self.reference is not None, "ranks": layout.ranks, "checkpoints_asynchronous": self.recipe.checkpoint.asynchronous,
        }
        if parallel.is_main():
            write_bytes(context.incarnation.effective(context.role), dump_tree(effective))

    def run(self) -> dict[str, Any]:
        """All remaining steps; returns what the job made."""
        self.context.progress(stage="starting the engine", step=self.step)
        self.probe_ids = self._first_probe()
        self.source.publish(self.policy, self.step, self.probe_ids)
        self.source.begin(self.step, self.carried)
        while self.step < self.recipe.steps:
            before = self.step
            try:
                self._raise_if_stopped()
                self.train_step(self.step + 1)
                self._settle(wait=False)
            except Stopped:  # between steps, or while waiting for rollouts: no update is half done
                self.save()
                raise
            assert self.step == before + 1, "a step that does not advance would loop for ever"
            if self.step < self.recipe.steps and self._save_is_due():
                self.save(wait=not self.recipe.checkpoint.asynchronous)
        return self.finish()

    def _raise_if_stopped(self) -> None:
        """Raise Stopped on every rank when one was told to stop, so that none waits for one that has left."""
        if any(parallel.gather_objects(self.context.stop_requested)):
            raise Stopped(f"{self.context.role}: stopped on request")

    def train_step(self, step: int) -> None:
        """One step of GRPO: sample, score, sample more where too little is left, learn, publish."""
        clock = Clock()
        with clock("generate"):
            rows = self.source.collect(step)
        batch = self._score(rows)
        for _ in range(self.recipe.data_filter.refill_rounds):
            if not (missing := self.recipe.rollout.prompts_per_step - len(batch.kept())):
                break
            with clock("generate"):
                rows += self.source.refill(step, missing)
            batch = self._score(rows)
        learned = self.learner.learn(batch, clock)
        self.learner.refresh_reference(step)
        # An engine scores one token less than the model has positions.
        self.probe_ids = [*rows[0]["prompt_ids"], *rows[0]["response_ids"]][: self.policy.shape.max_positions - 1]
        reload_error = self.source.reload_error(rows)
        with clock("publish"):
            self.source.publish(self.policy, step, self.probe_ids)
            self.source.request(step)
        timing, stale = clock.metrics(), [row["staleness"] for row in rows]
        metrics = {
            **batch.metrics, **learned, **timing, **self.source.counts(), "reload_error": reload_error, "updates": float(self.optimizer.updates),
            "rollout_tokens_per_second": batch.metrics["rollout_tokens"] / max(timing["seconds_generate"], 1e-9),
            "staleness_mean": sum(stale) / len(stale), "staleness_max": float(max(stale)),
        }
        if parallel.is_main():
            self.recorder.add(step, table_of(rows, ROLLOUT), metrics)
        self.step, self.memory, self.carried = step, batch.memory, self.source.manifest(step)
        self._show(metrics)

    def _score(self, rows: Rows) -> ScoredBatch:
        """All groups of a step so far, in order, as if they had come together: what the filters remember is of the steps before."""
        recipe = self.recipe
        return score_groups(
            rows, recipe.rollout.group_size, recipe.optimizer, recipe.data_filter, self.memory, most=recipe.rollout.prompts_per_step
        )

    def _save_is_due(self) -> bool:
        config = self.recipe.checkpoint
        late = config.minutes is not None and time.monotonic() - self._saved_at >= 60 * config.minutes
        return parallel.gather_objects(late or self.step % config.every == 0)[0]  # clocks differ

    def save(self, *, wait: bool = True) -> Path:
        """Checkpoint the run at the current step, its records flushed first; without `wait` it counts once `_settle` has found it written."""
        self._settle()
        folder = self.context.incarnation.checkpoint(self.step)
        if parallel.gather_objects(folder.exists())[0]:
            return folder
        if parallel.is_main():
            self.recorder.flush()
        self.context.check_claim()
        extra = {"step": self.step, "run": self.run_identity, "parts": self.recorder.parts, "memory": asdict(self.memory), "carried": self.carried}
        self._saving = checkpoint.begin(
            folder, self.policy, self.optimizer, extra, background=not wait, reference=self._moving_reference(),
        )
        self._saved_at = time.monotonic()
        if wait:
            self._settle()
        return folder

    def _moving_reference(self) -> Policy | None:
        """The reference where it is not the init for good, and so part of a checkpoint."""
        return None if self.recipe.optimizer.reference_every is None else self.reference

    def _settle(self, *, wait: bool = True) -> None:
        """Have the checkpoint that is being written count, once it is whole, and older ones go; without `wait` only if nobody would wait."""
        if self._saving is None or not (wait or all(parallel.gather_objects(self._saving.done))):
            return
        saved, self._saving = self._saving, None
        saved.finalize()
        self.context.check_claim()
        if parallel.is_main():
            retention.prune(self._checkpoint_folders(), self.recipe.checkpoint.keep, self.run_identity)
        # What the grace of a preemption is judged by: `evo-hpc doctor` reads it.
        self.context.progress(save_seconds=round(saved.seconds, 3))

    def finish(self) -> dict[str, Any]:
        """Save and export the final policy; what the controller needs to commit the run."""
        self.context.progress(stage="saving")
        folder = self.save()
        policy = self.context.incarnation.policy(self.step)
        if not parallel.gather_objects(policy.exists())[0]:
            self.policy.save_hf(policy, tokenizer_from=self.init)
            probe = probe_of(self.policy, self.probe_ids)
            if parallel.is_main():
                complete(policy, policy_meta(self.step, probe))
        return {
            "step": self.step, "run": self.run_identity, "parts": self.recorder.parts,
            "checkpoint": self.context.relative(folder), "policy": self.context.relative(policy),
            "effective": self._effective(),
        }

    def _effective(self) -> dict[str, str]:
        """What each role read back from inside, of the newest incarnation that got so far: a resumed run that finds nothing
        left to do ends before its engine is up."""
        found: dict[str, str] = {}
        for incarnation in self._incarnations(of_this_run=True):
            for role in ("trainer", "rollout"):
                if incarnation.effective(role).exists():
                    found[role] = self.context.relative(incarnation.effective(role))
        return found

    def _incarnations(self, *, of_this_run: bool = False) -> list[IncarnationPaths]:
        """Every start of every attempt at training this version, or at this very run of it, oldest first."""
        jobs = [job for job in OwnerPaths(self.context.job.owner).jobs() if job.kind == "train"]
        if of_this_run:
            jobs = [job for job in jobs if load_spec(job).params.get("run") == self.run_identity]
        return [incarnation for job in jobs for incarnation in job.incarnations()]

    def _checkpoint_folders(self) -> list[Path]:
        return [incarnation.checkpoints for incarnation in self._incarnations()]

    def _resume(self) -> tuple[int, list[dict[str, Any]]]:
        """Load the newest complete checkpoint that any incarnation of any attempt left; (0, []) when there is none."""
        folder = parallel.gather_objects(self._newest() if parallel.is_main() else None)[0]
        if folder is None:
            return 0, []
        extra = checkpoint.load(folder, self.policy, self.optimizer, reference=self._moving_reference())
        self.memory, self.carried = SpreadMemory(**extra.get("memory", {})), extra.get("carried", [])
        if parallel.is_main():
            print(f"resumed at step {extra['step']} from {folder}", flush=True)
        return extra["step"], extra["parts"]

    def _newest(self) -> Path | None:
        """The newest checkpoint of this run that is whole; those that are passed over are named in the log."""
        found = [path for parent in self._checkpoint_folders() for path in retention.checkpoints(parent)]
        for folder in sorted(found, key=lambda path: step_of(path) or 0, reverse=True):
            try:
                checkpoint.verify(folder)
            except checkpoint.CheckpointError as error:
                print(f"checkpoint {folder} is not usable and is passed over: {error}", flush=True)
                continue
            if retention.read_extra(folder)["run"] == self.run_identity:
                return folder
            print(f"checkpoint {folder} belongs to another run (recipe, init, seed or tasks differ) and is passed over", flush=True)
        return None

    def _first_probe(self) -> list[int]:
        """A token sequence for the first publication: any will do that fits, so the vocabulary in order."""
        size = min(self.policy.shape.vocab_size, 16)
        return list(range(size))

    def _show(self, metrics: dict[str, float]) -> None:
        self._seconds = [*self._seconds[-19:], metrics["seconds_step"]]
        per_step = sum(self._seconds) / len(self._seconds)
        self.context.progress(
            stage="training", step=self.step, reward=round(metrics["reward_mean"], 4), score=round(metrics["score_mean"], 4),
            tokens_per_second=round(metrics["rollout_tokens"] / metrics["seconds_step"]),
            seconds_left=round(per_step * (self.recipe.steps - self.step), 1),
        )


def run(context: RoleContext) -> dict[str, Any]:
    """Entry point of the trainer role."""
    return TrainingRun(context).run()
