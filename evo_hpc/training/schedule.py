"""Which groups are asked for with which weights, which of them a step begins with, and what becomes of the others. Pure: no files, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from evo_hpc.config.recipe import Rollout


@dataclass(frozen=True, order=True)
class GroupName:
    """The index-th group that a step asks for; where its task and seeds come from."""

    step: int
    index: int

    def __str__(self) -> str:
        return f"{self.step:06d}-{self.index:04d}"

    @classmethod
    def parse(cls, text: str) -> GroupName:
        step, _, index = text.partition("-")
        return cls(int(step), int(index))


@dataclass(frozen=True)
class Asked:
    """A batch that was asked for."""

    number: int
    weight_version: int
    """Sampled with these weights, or with newer ones where the newest are wanted."""
    groups: tuple[GroupName, ...]


@dataclass(frozen=True)
class Rest:
    """What a step did not take."""

    late: int
    """Groups that it had asked for itself."""
    dropped: list[GroupName]
    """Groups, its own or carried ones, that no step will take."""
    over: list[int]
    """Numbers of batches of which nothing is wanted any more and that were never answered."""


@dataclass
class Schedule:
    """The groups between being asked for and being learned from or dropped."""

    rollout: Rollout
    first: int
    """The step after which this incarnation began: it has no older weights."""
    batches: dict[int, Asked] = field(default_factory=dict)
    """Asked for, not answered, and of which something is wanted; by number."""
    arrived: dict[GroupName, int] = field(default_factory=dict)
    """Complete and not taken: the weights that sampled them."""
    _dropped: set[GroupName] = field(default_factory=set)
    """In batches of which something is still wanted: what comes of them is not taken."""
    _numbers: int = 0

    def weights_for(self, step: int) -> int:
        """The weights that a step's groups are asked for with: those of step - 1 - max_staleness."""
        return max(step - 1 - self.rollout.max_staleness, self.first)

    def posted_by(self, published: int) -> int:
        """The newest step whose groups can be asked for once the weights of step `published` are there."""
        return published + 1 + self.rollout.max_staleness

    def oldest_needed(self, published: int) -> int:
        """The oldest weights that anything asked for may still be sampled with, when those of step `published` are the newest."""
        return published - self.rollout.max_staleness

    def ask(self, names: Sequence[GroupName], weight_version: int, batch_groups: int) -> list[Asked]:
        """The batches, `batch_groups` groups each, in which `names` are asked for."""
        made = []
        for start in range(0, len(names), batch_groups):
            self._numbers += 1
            made.append(Asked(self._numbers, weight_version, tuple(names[start : start + batch_groups])))
            self.batches[self._numbers] = made[-1]
        return made

    def open(self, step: int) -> list[int]:
        """Numbers of the unanswered batches with groups that step `step` may take."""
        return [number for number, asked in self.batches.items() if any(name.step <= step for name in asked.groups)]

    def answer(self, number: int, versions: Mapping[GroupName, int]) -> None:
        """A batch is complete; versions: the weights that sampled each of its groups."""
        assert set(versions) == set(self.batches[number].groups), f"batch {number}: {sorted(versions)}"
        del self.batches[number]
        self.arrived.update({name: version for name, version in versions.items() if name not in self._dropped})
        self._dropped -= set(versions)

    def staleness(self, name: GroupName, step: int) -> int:
        """Of an arrived group, if step `step` learns from it."""
        return step - 1 - self.arrived[name]

    def choose(self, step: int) -> list[GroupName] | None:
        """The groups that a step begins with, in order; None while it must wait.

        With `wait` all that it has asked for; else the first prompts_per_step, by step and index, of those that are complete and fresh
        enough, earlier steps' among them.
        """
        if self.rollout.late_groups == "wait":
            return None if self._unanswered(step) else sorted(name for name in self.arrived if name.step == step)
        usable = sorted(name for name in self.arrived if name.step <= step and self.staleness(name, step) <= self.rollout.max_staleness)
        return usable[: self.rollout.prompts_per_step] if len(usable) >= self.rollout.prompts_per_step else None

    def take(self, chosen: Iterable[GroupName]) -> None:
        """These are learned from: they are never taken again."""
        for name in chosen:
            del self.arrived[name]

    def settle(self, step: int) -> Rest:
        """Decide about what `step` has left: what a later step may take stays, the rest is dropped."""
        left = sorted([name for name in self.arrived if name.step <= step] + self._unanswered(step))
        dropped = [name for name in left if not self._may_be_carried(name, step + 1)]
        for name in dropped:
            self.arrived.pop(name, None)
        gone, over = set(dropped), []
        for number, asked in list(self.batches.items()):
            if all(name in gone for name in asked.groups):
                del self.batches[number]
                over.append(number)
        self._dropped |= gone & {name for asked in self.batches.values() for name in asked.groups}
        return Rest(sum(name.step == step for name in left), dropped, over)

    def carried(self, step: int) -> list[GroupName]:
        """The manifest after `step`: asked for by it or before it, and neither learned from nor dropped."""
        return sorted([name for name in self.arrived if name.step <= step] + self._unanswered(step))

    def _unanswered(self, step: int) -> list[GroupName]:
        """With `wait` those of exactly this step: there are no others."""
        return [name for asked in self.batches.values() for name in asked.groups if name.step <= step and name not in self._dropped]

    def _may_be_carried(self, name: GroupName, step: int) -> bool:
        """Whether step `step` may take a group that an earlier one left."""
        if self.rollout.late_groups != "carry":
            return False
        if name in self.arrived:
            return self.staleness(name, step) <= self.rollout.max_staleness
        if self.rollout.weights == "newest":  # it may be sampled with newer weights than were asked for, yet not for ever
            return step - name.step <= self.rollout.max_staleness
        asked = next(each for each in self.batches.values() if name in each.groups)
        return step - 1 - asked.weight_version <= self.rollout.max_staleness
