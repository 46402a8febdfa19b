"""rules.yaml: when a finding holds, which knob to turn, what that should do, and how to undo it. Rules are data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from evo_hpc.agent import sentences
from evo_hpc.agent.intervention import InvalidIntervention, apply, value_of
from evo_hpc.agent.knobs import ForbiddenKnob, Knob, UnknownKnob, knob
from evo_hpc.agent.sentences import BadSentence
from evo_hpc.config.base import Config
from evo_hpc.config.campaign import FindingId
from evo_hpc.config.recipe import Recipe
from evo_hpc.config.yaml_io import ConfigError, line_of, load_model, load_tree
from evo_hpc.domains.base import DomainError, get_domain
from evo_hpc.errors import UserError
from evo_hpc.lineage.version import Prediction

MERGE = "merge"
"""What a merge is called among the rules that were considered."""
SCORES = ("dev/avg_at_k", "probe/avg_at_k")
"""Metrics that are scores; every other one is an analyzer's measure."""

_MEASURE = re.compile(r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$")
MeasureName = Annotated[str, Field(pattern=_MEASURE.pattern)]


class BadRules(UserError):
    """A rules.yaml that cannot be used; one line a problem, each with file:line."""


class Condition(Config):
    """Something that holds of the incumbent or does not: a finding is there, or a measure lies beyond a number."""

    finding: FindingId | None = None
    """This finding is there."""
    any_of: list[FindingId] = Field(default_factory=list)
    """At least one of these findings is there."""
    measure: MeasureName | None = None
    """`analyzer.measure`, with `above`, `below` or both."""
    above: float | None = None
    """The measure is greater than this."""
    below: float | None = None
    """The measure is less than this."""

    @model_validator(mode="after")
    def _one(self) -> Condition:
        if (self.finding is not None) + bool(self.any_of) + (self.measure is not None) != 1:
            raise ValueError("a condition names one of `finding`, `any_of` and `measure`")
        if (self.measure is not None) != (self.above is not None or self.below is not None):
            raise ValueError("a measure comes with `above` or `below`, and nothing else does")
        return self

    @property
    def findings(self) -> list[str]:
        """The findings that it names."""
        return self.any_of or ([self.finding] if self.finding else [])

    @property
    def bounds(self) -> str:
        """Of a measure, in words: `above 0.3`."""
        return " and ".join(f"{word} {bound:g}" for word, bound in (("above", self.above), ("below", self.below)) if bound is not None)


class Turn(Config):
    """The knob to turn, and the values to try in order: the first that is not barred is proposed."""

    field: str
    """Dotted, e.g. `optimizer.lr` or `reward.weights.format`."""
    set: list[Any] | None = None
    """Values."""
    multiply: list[float] | None = None
    """Factors of today's value."""
    add: list[float] | None = None
    """Amounts to add to today's value."""
    at_least: float | None = None
    """No value below this."""
    at_most: float | None = None
    """No value above this."""

    @model_validator(mode="after")
    def _one_ladder(self) -> Turn:
        ladders = [ladder for ladder in (self.set, self.multiply, self.add) if ladder is not None]
        if len(ladders) != 1 or not ladders[0]:
            raise ValueError("give exactly one of `set`, `multiply` and `add`, with at least one value")
        if self.multiply is not None and any(factor <= 0 or factor == 1 for factor in self.multiply):
            raise ValueError("factors in `multiply` are positive and not 1")
        if self.add is not None and 0 in self.add:
            raise ValueError("0 in `add` changes nothing")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError("`at_least` is greater than `at_most`")
        return self

    @property
    def ladder(self) -> Literal["set", "multiply", "add"]:
        return "set" if self.set is not None else "multiply" if self.multiply is not None else "add"

    @property
    def rungs(self) -> list[Any]:
        """Values, factors or amounts, in the order to be tried."""
        found: list[Any] = getattr(self, self.ladder)
        return found


class Rule(Config):
    """One rule."""

    id: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
    """Short name, e.g. `larger-steps`."""
    about: str = ""
    """For people: why a practitioner would do this."""
    domain: str | None = None
    """The only domain that it is for; null = any."""
    when: Annotated[list[Condition], Field(min_length=1)]
    """All of these hold."""
    unless: list[Condition] = Field(default_factory=list)
    """None of these holds."""
    change: Turn
    """The single intervention."""
    hypothesis: str
    """Sentence template: change X, then metric Y moves, because Z."""
    prediction: Prediction
    """What moves, by how much, if the hypothesis holds."""
    rollback: str
    """Sentence template: what to do if it does not."""


class Rules(Config):
    """`rules.yaml`, in order of priority."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    rules: list[Rule]
    """The first that holds comes first."""

    def mentioned(self) -> dict[str, list[str]]:
        """Finding or measure -> ids of the rules whose conditions or predictions name it: for a check against the analyzers."""
        found: dict[str, list[str]] = {}
        for rule in self.rules:
            conditions = [*rule.when, *rule.unless]
            names = {name for each in conditions for name in (*each.findings, each.measure) if name}
            for name in sorted(names | ({rule.prediction.metric} - set(SCORES))):
                found.setdefault(name, []).append(rule.id)
        return found


def load_rules(path: Path) -> Rules:
    """The rules, every one of them able to act. Raises BadRules with one line a problem, each with file:line."""
    try:
        rules = load_model(path, Rules)
    except ConfigError as error:
        raise BadRules(str(error)) from error
    problems = list(_problems(rules))
    if problems:
        tree = load_tree(path)
        raise BadRules("\n".join(
            f"{path}:{line_of(tree, list(place))}: `{'.'.join(map(str, place))}`: {message}" for place, message in problems
        ))
    return rules


Place = tuple[str | int, ...]


def _problems(rules: Rules) -> Iterator[tuple[Place, str]]:
    first: dict[str, int] = {}
    for number, rule in enumerate(rules.rules):
        here: Place = ("rules", number)
        if rule.id == MERGE:
            yield (*here, "id"), f"`{MERGE}` is the name of a merge of siblings; call the rule something else"
        if rule.id in first:
            yield (*here, "id"), f"{rule.id} is the id of rule {first[rule.id] + 1} too; every rule needs its own"
        first.setdefault(rule.id, number)
        yield from _domain_problems(rule, here)
        yield from _prediction_problems(rule.prediction, (*here, "prediction"))
        try:
            turned = knob(rule.change.field)
        except (UnknownKnob, ForbiddenKnob) as error:
            yield (*here, "change", "field"), str(error)
            continue
        wrong = list(_turn_problems(rule.change, turned, (*here, "change")))
        yield from wrong
        if not wrong:
            yield from _sentence_problems(rule, turned, here)


def _domain_problems(rule: Rule, here: Place) -> Iterator[tuple[Place, str]]:
    if rule.domain is None:
        return
    try:
        components = get_domain(rule.domain).component_names
    except DomainError as error:
        yield (*here, "domain"), str(error)
        return
    section, _, component = rule.change.field.rpartition(".")
    if section == "reward.weights" and component not in components:
        yield (*here, "change", "field"), f"{rule.domain} has no reward component {component!r}; it has {', '.join(components)}"


def _prediction_problems(prediction: Prediction, here: Place) -> Iterator[tuple[Place, str]]:
    if prediction.metric not in SCORES and not _MEASURE.match(prediction.metric):
        yield (*here, "metric"), f"{prediction.metric} is neither a score ({', '.join(SCORES)}) nor a measure (`analyzer.measure`)"
    if prediction.by < 0:
        yield (*here, "by"), f"{prediction.by:g} is negative; the direction says which way"


def _turn_problems(turn: Turn, turned: Knob, here: Place) -> Iterator[tuple[Place, str]]:
    if turned.kind == "other":
        for key in ("multiply", "add", "at_least", "at_most"):
            if getattr(turn, key) is not None:
                yield (*here, key), f"{turned.field} is not a number; give its values with `set`"
    if turn.set is not None:
        for place, value in enumerate(turn.set):
            try:
                apply(Recipe(), turned.field, value)
            except InvalidIntervention as error:
                if error.within(turned.path):  # what depends on other fields is known once there is a recipe to change
                    yield (*here, "set", place), str(error)


def _sentence_problems(rule: Rule, turned: Knob, here: Place) -> Iterator[tuple[Place, str]]:
    before = value_of(Recipe(), turned.field)
    if before is None and turned.kind != "other":
        before = 1 if turned.kind == "integer" else 0.5
    after = rule.change.set[0] if rule.change.set is not None else before
    for name in ("hypothesis", "rollback"):
        try:
            sentences.check(getattr(rule, name), field=turned.field, before=before, after=after)
        except BadSentence as error:
            yield (*here, name), str(error)
