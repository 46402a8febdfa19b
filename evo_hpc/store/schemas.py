"""The explicit, versioned Arrow schemas of every Parquet table. No type is ever inferred from data.

How a schema may grow: new columns are nullable, no column is dropped, renamed or given another type, and each change
raises SCHEMA_VERSION; then every file of an older version stays readable (store/tables.py fills nulls in).
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 2
"""2: metrics of importance weights, of the dual clip, of the KL in the reward, of groups and updates left out, of groups late, carried, refilled,
and of staleness."""
TABLE_KEY = b"evo_hpc.table"
VERSION_KEY = b"evo_hpc.schema_version"


def _schema(table: str, fields: list[tuple[str, pa.DataType, bool]]) -> pa.Schema:
    return pa.schema(
        [pa.field(name, kind, nullable=nullable) for name, kind, nullable in fields],
        metadata={TABLE_KEY: table.encode(), VERSION_KEY: str(SCHEMA_VERSION).encode()},
    )


_TOOL_CALL = pa.struct([
    pa.field("name", pa.string()), pa.field("arguments", pa.string()),
    pa.field("ok", pa.bool_()), pa.field("seconds", pa.float64()),
])

ROLLOUT = _schema("rollout", [
    # where it belongs
    ("campaign", pa.string(), False), ("version", pa.string(), False),
    ("suite", pa.string(), False),              # train, or the evaluation suite
    ("policy_step", pa.int64(), False),         # trainer steps behind the policy that sampled it
    ("trainer_step", pa.int64(), True),         # the step that consumed it; null in evaluations
    ("task_id", pa.string(), False), ("group_id", pa.string(), False), ("sample", pa.int32(), False),
    ("seed", pa.int64(), False),
    # what was said
    ("turns", pa.int32(), False),
    ("prompt_ids", pa.list_(pa.int32()), False), ("response_ids", pa.list_(pa.int32()), False),
    ("loss_mask", pa.list_(pa.int8()), False),  # per response token: 1 where the policy produced it
    ("logprobs", pa.list_(pa.float32()), False),  # per response token, under the sampling temperature; 0 where masked
    ("text", pa.string(), False), ("messages", pa.string(), True),  # messages: JSON, multi-turn only
    ("tool_calls", pa.list_(_TOOL_CALL), False),
    ("stop_reason", pa.string(), False),        # stop, length, turns (the environment would have gone on), error (it failed)
    # what it earned
    ("reward", pa.float64(), True),             # null when error_class is set
    ("components", pa.map_(pa.string(), pa.float64()), False),
    ("verifier_detail", pa.string(), True), ("error_class", pa.string(), True),
    # who produced and judged it
    ("weight_version", pa.int64(), False), ("evaluator_epoch", pa.string(), True),
    # how long it took, in seconds
    ("generate_seconds", pa.float64(), False), ("verify_seconds", pa.float64(), False),
    # features, so that analyzers need not read tokens
    ("prompt_tokens", pa.int32(), False), ("response_tokens", pa.int32(), False),
    ("truncated", pa.bool_(), False),
    ("trigrams_total", pa.int32(), False), ("trigrams_unique", pa.int32(), False), ("longest_token_run", pa.int32(), False),
    ("tool_call_count", pa.int32(), False), ("tool_error_count", pa.int32(), False),
    ("domain_features", pa.map_(pa.string(), pa.float64()), False),
    ("task_attributes", pa.map_(pa.string(), pa.string()), False),
    # what the trainer made of it; null in evaluations
    ("advantage", pa.float64(), True), ("kept", pa.bool_(), True), ("staleness", pa.int32(), True),
])
"""One row a rollout, in training and in evaluation alike."""

METRIC = _schema("metric", [
    ("campaign", pa.string(), False), ("version", pa.string(), False), ("attempt", pa.int32(), False),
    ("incarnation", pa.int32(), False), ("step", pa.int64(), False), ("name", pa.string(), False),
    ("value", pa.float64(), True), ("unit", pa.string(), False), ("kind", pa.string(), False),
    ("time", pa.timestamp("us", tz="UTC"), False),
])
"""One row a metric and step (long format); a value that is not finite is null."""

METRICS: dict[str, tuple[str, str]] = {
    # name: (unit, kind); kind is the layer that reads it
    "reward_mean": ("1", "score"), "reward_std": ("1", "signal"), "score_mean": ("1", "score"),
    "groups": ("1", "signal"), "groups_kept": ("1", "signal"), "groups_all_fail": ("1", "signal"),
    "groups_all_pass": ("1", "signal"), "groups_errored": ("1", "signal"), "groups_filtered": ("1", "signal"), "zero_variance_fraction": ("1", "signal"),
    "groups_late": ("1", "signal"), "groups_carried": ("1", "signal"), "groups_dropped_late": ("1", "signal"), "groups_refilled": ("1", "signal"),
    "staleness_mean": ("1", "signal"), "staleness_max": ("1", "signal"),
    "group_std_mean": ("1", "signal"), "advantage_positive_fraction": ("1", "signal"),
    "response_tokens_mean": ("token", "length"), "truncated_fraction": ("1", "length"),
    "loss": ("1", "optimisation"), "surrogate": ("1", "optimisation"), "kl": ("nat", "optimisation"),
    "entropy": ("nat", "optimisation"), "clip_fraction_low": ("1", "optimisation"),
    "clip_fraction_high": ("1", "optimisation"), "ratio_max": ("1", "optimisation"), "ratio_min": ("1", "optimisation"),
    "approx_kl_old": ("nat", "optimisation"), "grad_norm": ("1", "optimisation"), "grad_clipped": ("1", "optimisation"), "updates_skipped": ("1", "optimisation"),
    "lr": ("1", "optimisation"), "updates": ("1", "optimisation"), "trained_tokens": ("token", "optimisation"),
    "clip_fraction_dual": ("1", "optimisation"), "kl_in_reward_mean": ("1", "optimisation"),
    "importance_mean": ("1", "mismatch"), "importance_max": ("1", "mismatch"), "importance_ess": ("1", "mismatch"),
    "importance_outside": ("1", "mismatch"),
    "behaviour_kl": ("nat", "mismatch"), "sampler_kl": ("nat", "mismatch"), "sampler_logprob_diff_max": ("nat", "mismatch"), "reload_error": ("nat", "mismatch"),
    "seconds_step": ("s", "time"), "seconds_generate": ("s", "time"), "seconds_logprobs": ("s", "time"),
    "seconds_train": ("s", "time"), "seconds_publish": ("s", "time"), "seconds_other": ("s", "time"),
    "rollout_tokens": ("token", "time"), "rollout_tokens_per_second": ("token/s", "time"),
}
"""Every metric that the trainer may write; a name that is not here is refused."""

STEP = _schema("step", [
    ("campaign", pa.string(), False), ("version", pa.string(), False), ("attempt", pa.int32(), False),
    ("incarnation", pa.int32(), False), ("step", pa.int64(), False), ("time", pa.timestamp("us", tz="UTC"), False),
    *[(name, pa.float64(), True) for name in METRICS],
])
"""One row a step, one column a metric: the trainer's own wide table."""

TABLES: dict[str, pa.Schema] = {"rollout": ROLLOUT, "metric": METRIC, "step": STEP}
