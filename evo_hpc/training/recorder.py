"""What a training run leaves behind: rollouts and metrics as Parquet parts that end at checkpoints, and which parts count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from evo_hpc.jobs.context import RoleContext
from evo_hpc.paths import part_name
from evo_hpc.store.atomic import write_json
from evo_hpc.store.manifest import sha256
from evo_hpc.store.schemas import METRIC, ROLLOUT, STEP
from evo_hpc.store.tables import metric_rows, write_table


class Recorder:
    """Buffers one incarnation's rows and writes them as parts.

    `parts` is the chain of files that make up the run so far, over all incarnations: a checkpoint carries it, so that a
    resumed run counts what came before the checkpoint and nothing that came after. parts.json shows it to whoever
    watches the run; a part ends at every step that the watch looks at.
    """

    def __init__(self, context: RoleContext, parts: list[dict[str, Any]], flush_steps: int) -> None:
        self._context = context
        self.parts = list(parts)
        self._flush_steps = flush_steps
        self._watch_every = context.campaign.watch.every
        self._first: int | None = None
        self._last = 0
        self._rollouts: list[pa.Table] = []
        self._metrics: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        if self.parts and not context.rank:
            self._show_parts()

    def add(self, step: int, rollouts: pa.Table, metrics: dict[str, float]) -> None:
        """Take one step's rows; writes them when enough have come together."""
        spec = self._context.spec
        where = {
            "campaign": spec.campaign, "version": spec.owner, "attempt": spec.attempt,
            "incarnation": self._context.incarnation.number,
        }
        long, wide = metric_rows(where, step, metrics)
        self._first = step if self._first is None else self._first
        self._last = step
        self._rollouts.append(rollouts)
        self._metrics += long
        self._steps.append(wide)
        if len(self._steps) >= self._flush_steps or (self._watch_every and step % self._watch_every == 0):
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if self._first is None:
            return
        self._context.check_claim()
        inc = self._context.incarnation
        name = part_name(self._first, self._last)
        for table, folder, rows, schema in (
            ("rollouts", inc.rollouts, pa.concat_tables(self._rollouts), ROLLOUT),
            ("metrics", inc.metrics, self._metrics, METRIC), ("steps", inc.steps, self._steps, STEP),
        ):
            path = folder / name
            write_table(path, rows, schema)
            self.parts.append(self._described(table, path, self._first, self._last))
        self._first, self._rollouts, self._metrics, self._steps = None, [], [], []
        self._show_parts()

    def _show_parts(self) -> None:
        shown = {"run": self._context.spec.params["run"], "parts": self.parts}
        write_json(self._context.incarnation.parts, shown, durable=False)

    def _described(self, table: str, path: Path, first: int, last: int) -> dict[str, Any]:
        return {
            "table": table, "path": self._context.relative(path), "first_step": first, "last_step": last,
            "bytes": path.stat().st_size, "sha256": sha256(path),
        }
