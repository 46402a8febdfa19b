"""The evaluator epoch: the hash of everything that determines a score. Scores of different epochs are never compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from evo_hpc.config.campaign import Evaluation


def epoch_components(
    *, suite: str, task_set: str, evaluation: Evaluation, campaign_seed: int, verifier: Mapping[str, str], template: str,
    tokenizer: str, stop_token_ids: tuple[int, ...], engine: Mapping[str, str], score: str,
) -> dict[str, str]:
    """Everything that determines a score, by name.

    task_set: hash of the tasks. template: the chat template's text. tokenizer: hash of tokenizer.json. engine: its
    name, version, dtype, log-probability mode (the length of its context is not among them: every prompt and response
    fits, or the evaluation is refused). Hardware is recorded beside it, not hashed.
    """
    return {
        "suite": suite, "task_set": task_set, "score": score,
        "samples_per_task": str(evaluation.samples_per_task), "temperature": repr(evaluation.temperature),
        "top_p": repr(evaluation.top_p), "max_response_tokens": str(evaluation.max_response_tokens), "seed": f"{campaign_seed}/{evaluation.seed}",
        "stop_token_ids": ",".join(map(str, stop_token_ids)),
        "template": hashlib.sha256(template.encode()).hexdigest(), "tokenizer": tokenizer,
        **{f"verifier.{name}": value for name, value in verifier.items()},
        **{f"engine.{name}": value for name, value in engine.items() if name != "max_model_len"},
    }


def epoch_of(components: Mapping[str, str]) -> str:
    """The epoch's name: 16 hex digits."""
    canonical = json.dumps(dict(components), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Which components differ, as `name: a -> b`; empty when the epochs are the same."""
    return [f"{name}: {a.get(name)} -> {b.get(name)}" for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
