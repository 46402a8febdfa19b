"""Evidence made by hand: versions, their decisions, findings and measures, without a campaign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evo_hpc.agent.evidence import Evidence, VersionEvidence
from evo_hpc.agent.intervention import apply
from evo_hpc.agent.rules import Rules, load_rules
from evo_hpc.config.recipe import Recipe
from evo_hpc.lineage.decision import Decision
from evo_hpc.lineage.factors import changes
from evo_hpc.lineage.findings import Citation, Measure
from evo_hpc.lineage.version import Version

START = Recipe(steps=60, reward={"weights": {"correct": 1.0, "format": 0.1}}, optimizer={"lr": 5e-5})  # type: ignore[arg-type]

LARGER = """
  - id: larger-steps
    when: [{finding: optimisation.inert_clip}]
    change: {field: optimizer.lr, multiply: [4, 2], at_most: 1.0e-2}
    hypothesis: "{{ field }} {{ before }} -> {{ after }}: {{ because }}"
    prediction: {metric: dev/avg_at_k, direction: up, by: 0.01}
    rollback: "Back to {{ before }}."
"""
GROUPS = """
  - id: larger-groups
    when: [{measure: signal.dead_group_fraction, above: 0.3}]
    change: {field: rollout.group_size, multiply: [2], at_most: 64}
    hypothesis: "{{ measures['signal.dead_group_fraction'] | percent }} of the groups are dead."
    prediction: {metric: signal.dead_group_fraction, direction: down, by: 0.05}
    rollback: "Back to {{ before }}."
"""


def rules(folder: Path, *texts: str) -> Rules:
    """Rules from their YAML."""
    path = folder / "rules.yaml"
    path.write_text("rules:" + "".join(texts), encoding="utf-8")
    return load_rules(path)


def turned(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """A recipe with some fields set."""
    for field, value in settings.items():
        recipe = apply(recipe, field, value)
    return recipe


def finding(name: str, version: str = "v0001", value: float = 0.5) -> Citation:
    return Citation(finding=name, version=version, severity="warning", value=value, threshold=0.3, text=f"{name} holds.", source="findings.json")


def decided(name: str, kind: str | None, merge_with: list[str] | None = None) -> Decision | None:
    if kind is None:
        return None
    return Decision(version=name, decision=kind, merge_with=merge_with or [], because="So it came out.")  # type: ignore[arg-type]


class Made:
    """A tree that grows: v0000 untrained, v0001 the incumbent, then whatever is added."""

    def __init__(self, *findings: str, measures: Mapping[str, Measure] | None = None, start: Recipe = START) -> None:
        root = VersionEvidence(Version(id="v0000"), start.model_copy(update={"steps": 0}), "base", (), None, None, {}, ())
        self.versions: dict[str, VersionEvidence] = {"v0000": root}
        self.add({}, "keep", parent="v0000", recipe=start)
        self.versions["v0001"] = replace(
            self.versions["v0001"], findings=tuple(finding(name) for name in findings), measures=measures or {},
        )

    def add(
        self, settings: Mapping[str, Any], kind: str | None, *, parent: str = "v0001", merge_with: list[str] | None = None,
        parents: list[str] | None = None, init: str = "base", recipe: Recipe | None = None,
    ) -> str:
        """A version that sets some fields of its parent's recipe, and what was decided about it."""
        name = f"v{len(self.versions):04d}"
        before = self.versions[parent].recipe
        recipe = turned(recipe or before, settings)
        version = Version(id=name, parents=parents or [parent], evidence=[finding("signal.dead_groups")])
        self.versions[name] = VersionEvidence(
            version, recipe, init, tuple(changes(before, recipe)), decided(name, kind, merge_with), None, {}, (),
        )
        return name

    def evidence(self, incumbent: str = "v0001") -> Evidence:
        return Evidence(incumbent, self.versions, "arithmetic", "h0001")
