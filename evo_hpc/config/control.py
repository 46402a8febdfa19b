"""control.yaml: what a person wishes of a running controller. Read at every tick; no such file = go on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from evo_hpc.config.base import Config
from evo_hpc.config.yaml_io import ConfigError, _parse, dump_tree, line_of, load_model, load_tree, plain
from evo_hpc.paths import VERSION_ID, CampaignPaths

Wish = Literal["run", "pause", "drain", "stop"]

_NEW = """\
# What you wish of the controller of this campaign: it looks at every tick. Remove the file, or write `state: run`, to have it go on.
schema_version: 1
state: run                  # run; pause: nothing new is submitted, what runs goes on, the controller stays; drain: nothing new is
                            # submitted, what runs ends and is committed, then the controller ends; stop: jobs save and end now, then it ends
cancel: []                  # versions to end for good: their jobs are stopped and they are pruned, e.g. [v0004]
reason:                     # why, for people; it becomes the reason of the decisions on the versions above
"""


class Control(Config):
    """`control.yaml`."""

    schema_version: Literal[1] = 1
    """Version of this file's format."""
    state: Wish = "run"
    """`run`. `pause`: nothing new is submitted; jobs go on, and the controller stays. `drain`: nothing new is submitted; jobs end and
    are committed, then the controller ends. `stop`: jobs save and end now, then the controller ends."""
    cancel: list[Annotated[str, Field(pattern=VERSION_ID.pattern)]] = Field(default_factory=list)
    """Versions to end for good: their jobs are stopped, nothing more is submitted for them, and they are pruned by your decision."""
    reason: str | None = None
    """Why, for people; the reason of the decisions on cancelled versions."""


def read_control(paths: CampaignPaths, versions: Mapping[str, Sequence[str]] | None = None) -> Control:
    """The wish on file, `run` where there is none. Raises ConfigError with file and line.

    versions: parents by version id. Where given, only versions that there are can be cancelled, and none without parents.
    """
    if not paths.control_yaml.exists():
        return Control()
    control = load_model(paths.control_yaml, Control)
    if versions is not None and (found := _unknown(paths, control, versions)):
        raise ConfigError("\n".join(found))
    return control


def place_of(paths: CampaignPaths, *location: str | int) -> str:
    """Where a field stands: file:line. Raises ConfigError."""
    return f"{paths.control_yaml}:{line_of(load_tree(paths.control_yaml), list(location))}"


def _unknown(paths: CampaignPaths, control: Control, versions: Mapping[str, Sequence[str]]) -> list[str]:
    """One message for each version that cannot be cancelled."""
    found = []
    for index, version in enumerate(control.cancel):
        if (why := _why_not(version, versions)) is not None:
            found.append(f"{place_of(paths, 'cancel', index)}: `cancel`: {why}")
    return found


def _why_not(version: str, versions: Mapping[str, Sequence[str]]) -> str | None:
    """Why a version cannot be cancelled, in words."""
    if version not in versions:
        near = difflib.get_close_matches(version, list(versions), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(versions) or 'none yet'}"
        return f"no version {version} in this campaign; {hint}"
    if not versions[version]:
        return f"everything starts from {version}, so it cannot be cancelled; write `state: stop` to end the campaign here"
    return None


def changed(paths: CampaignPaths, versions: Mapping[str, Sequence[str]] | None = None, **changes: Any) -> tuple[Control, bytes]:
    """The wish with some fields changed, and the whole file for it, a person's comments kept; nothing is written.

    Raises ConfigError when the file that is there cannot be read or a change does not fit; `versions` as in read_control.
    """
    there = paths.control_yaml.exists()
    if there:
        read_control(paths)  # what is wrong by now is a person's to mend, and told with its line
    tree = load_tree(paths.control_yaml) if there else _parse(paths.control_yaml, _NEW)
    for name, value in changes.items():
        _set(tree, name, value)
    try:
        control = Control.model_validate(plain(tree))
    except ValidationError as error:
        told = "; ".join(f"`{'.'.join(map(str, problem['loc']))}`: {problem['msg']}" for problem in error.errors())
        raise ConfigError(f"{paths.control_yaml}: not changed: {told}") from error
    for version in control.cancel:
        if versions is not None and (why := _why_not(version, versions)) is not None:
            raise ConfigError(f"{paths.control_yaml}: not changed: `cancel`: {why}")
    return control, dump_tree(tree)


def _set(tree: CommentedMap, name: str, value: Any) -> None:
    """Set a field; of a list only what differs is touched, so that the comments beside its other items stay."""
    there = tree.get(name)
    if not isinstance(value, list) or not isinstance(there, CommentedSeq):
        tree[name] = value
        return
    for index in reversed(range(len(there))):
        if there[index] not in value:
            del there[index]
    there.extend(item for item in value if item not in there)

