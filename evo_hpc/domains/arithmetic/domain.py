"""The domain object of `arithmetic`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from evo_hpc.config.base import Config
from evo_hpc.domains.arithmetic import policy, scratchpad, supervised, verifier
from evo_hpc.domains.arithmetic.config import ArithmeticConfig
from evo_hpc.domains.arithmetic.supervised import Example
from evo_hpc.domains.arithmetic.tasks import make_tasks
from evo_hpc.domains.base import Task, Verdict, source_hash


class Arithmetic:
    """Sums of two numbers with the same count of digits; implements `evo_hpc.domains.base.Domain`."""

    name: str = "arithmetic"
    version: str = "1"
    component_names: tuple[str, ...] = verifier.COMPONENTS
    feature_names: tuple[str, ...] = verifier.FEATURES
    config_type: type[Config] = ArithmeticConfig

    def make_tasks(self, config: ArithmeticConfig) -> dict[str, list[Task]]:
        return make_tasks(config)

    def verify(self, task: Task, text: str, *, truncated: bool) -> Verdict:
        return verifier.verify(task, text, truncated=truncated)

    def features(self, text: str) -> dict[str, int | float]:
        return verifier.features(text)

    def write_policy_files(self, folder: Path) -> None:
        """Config, tokenizer and chat template of the demo policy: all of a model folder but its weights."""
        policy.write_policy_files(folder)

    def supervised_examples(self, config: ArithmeticConfig, *, seed: int) -> Iterator[Example]:
        """The worked sums that a base policy is made from."""
        return supervised.supervised_examples(config, seed=seed)

    def identity(self) -> dict[str, str]:
        return {
            "domain": self.name,
            "version": self.version,
            "verifier_sha256": source_hash(scratchpad.__file__, verifier.__file__),
        }
