"""What a controller remembers from one look at the folders to the next, and how it notices that a file changed.

It decides what is read again, never what a file means: a state made with it equals one made without, once its sweep has come
round. What it goes by are the times, sizes and inodes of files (store/signature.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from evo_hpc.lineage.looks import Look, read_looks
from evo_hpc.lineage.tree import Node
from evo_hpc.paths import VERSION_ID, CampaignPaths, JobPaths, VersionPaths
from evo_hpc.store.signature import Signature, again, take

if TYPE_CHECKING:
    from evo_hpc.agent.proposal import Round
    from evo_hpc.controller.state import VersionState

T = TypeVar("T")
RECORDS_EVERY = 16
"""Looks from one at the records of an open version's jobs to the next."""


@dataclass(frozen=True)
class Taken:
    """The signatures of a version's files at one time."""

    whole: Signature
    quick: Signature
    """Without the records in the folders of its jobs, which are written once: that another one has come shows in their folders."""

    @classmethod
    def of(cls, folder: str) -> Taken:
        """Now."""
        whole = take(folder, _left_out)
        return cls(whole, again(folder, tuple(name for name in whole.names if not _is_record(name))))


@dataclass(frozen=True)
class Remembered:
    """A version as it was read."""

    state: VersionState
    taken: Taken
    """Of its files before that."""
    parts: tuple[str, ...] = ()
    """Files that a training run rewrites all the time, which `state.running` was read from."""
    seen: tuple[Any, ...] = ()
    """What it was read by: parts and jobs."""

    @classmethod
    def of(cls, state: VersionState, taken: Taken) -> Remembered:
        """One that was read just now."""
        parts = _parts_of(state)
        return cls(state, taken, parts, _seen(state, parts))


@dataclass
class Ledger(Generic[T]):
    """Write-once records numbered from 1, of which the next is read when it comes; all others by the sweep."""

    items: tuple[T, ...] = ()
    _signatures: list[tuple[int, ...]] = field(default_factory=list)
    """Of the leading items whose files have settled."""
    _folder: tuple[int, ...] | None = None
    _next: int = 0

    def read(self, folder: Path, path_of: Callable[[int], Path], read: Callable[[Sequence[T]], Iterable[T]], cache: StateCache) -> tuple[T, ...]:
        """All records. `read` is given the first ones, which it need not read again, and returns all."""
        self._swept(path_of, cache.sweep)
        now, before = time.time_ns(), _stat(str(folder))
        if before is not None and before == self._folder and len(self._signatures) == len(self.items):
            return self.items
        found = tuple(read(self.items[: len(self._signatures)]))
        del self._signatures[len(found) :]
        for number in range(len(self._signatures), len(found)):
            signature = _stat(str(path_of(number + 1)))
            if signature is None or signature[0] + cache.margin_ns >= now:
                break  # read again the next time
            self._signatures.append(signature)
        if found != self.items:
            self.items = found
        self._folder = before if before is not None and before[0] + cache.margin_ns < now else None
        return self.items

    def _swept(self, path_of: Callable[[int], Any], sweep: int) -> None:
        """Forget everything when one of the next few files has changed."""
        for _ in range(min(sweep, len(self._signatures))):
            self._next = (self._next + 1) % len(self._signatures)
            if _stat(str(path_of(self._next + 1))) != self._signatures[self._next]:
                self.items, self._signatures, self._folder = (), [], None
                return


@dataclass
class StateCache:
    """One controller's memory of a campaign.

    At every look: which versions there are; the files of the open ones, but logs and their jobs' records, which are looked at every
    RECORDS_EVERY looks; all files of `sweep` closed ones, in turn. So an edit of a closed version shows within ceil(closed / sweep) + 1
    looks, later where the sweep's time runs out first.
    """

    sweep: int = 100
    """Closed versions, looks and rounds whose files are looked at, each time."""
    sweep_seconds: float = 0.2
    """The longest that the versions' may take each time, for network filesystems; one is always looked at."""
    settle_seconds: float = 2.0
    """What changed so shortly before it was read is read again: a change in the same tick of the filesystem's clock does not show."""
    versions: dict[str, Remembered] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    """As their own folders say, where they start not resolved."""
    looks: Ledger[Look] = field(default_factory=Ledger)
    rounds: Ledger[Round] = field(default_factory=Ledger)
    decisions: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """What each decision was last found right by."""
    changed: set[str] = field(default_factory=set)
    """Versions that were read at this look, or have gone."""
    watched: set[str] = field(default_factory=set)
    """Versions that are looked at every time: those that are open, and those that have not settled."""
    _touched: set[str] = field(default_factory=set)
    """Versions that were remembered anew since `states` was last made."""
    _states: dict[str, VersionState] = field(default_factory=dict)
    _before: dict[str, Remembered] = field(default_factory=dict)
    """Of `changed`: as they were."""
    _taken: dict[str, Taken] = field(default_factory=dict)
    """Of versions that are to be read, taken before."""
    _listed: tuple[tuple[int, ...] | None, frozenset[str], tuple[str, ...]] = (None, frozenset(), ())
    """The folder of all versions, where it has settled: what stat said of it, the names of versions in it, and other names."""
    _looks: int = 0
    _tree: dict[str, Node] | None = None
    _tree_of: dict[str, Node] = field(default_factory=dict)
    """The nodes that make it up."""
    _key: tuple[Any, ...] | None = None
    _due: list[str] = field(default_factory=list)
    """Versions that the sweep has still to come to in this round, the next one last."""
    _right: tuple[Any, ...] | None = None
    """Rounds and harnesses with which all versions were last found right."""
    _checking: tuple[Any, ...] | None = None
    _values: dict[str, tuple[Signature, Any]] = field(default_factory=dict)

    @property
    def margin_ns(self) -> int:
        """settle_seconds, in nanoseconds."""
        return int(self.settle_seconds * 1e9)

    def look(self, paths: CampaignPaths) -> list[VersionPaths]:
        """Find out what has changed, and forget it; the versions whose own files are to be read."""
        root = str(paths.versions_folder)
        there = self._list(root)
        self._looks += 1
        self._before, self._taken, self.changed = {}, {}, set()
        for name in (self.nodes.keys() - there) | (self.nodes.keys() - self.versions.keys()):  # the latter: a look that failed
            self._forget(name)
        turn = self._looks % RECORDS_EVERY
        for name in tuple(self.watched):
            self._check(root, name, quick=_number(name) % RECORDS_EVERY != turn)
        self._sweep(root)
        unread = sorted(there - self.nodes.keys(), key=_number)
        for name in unread:
            self.changed.add(name)
            self._taken[name] = Taken.of(f"{root}/{name}")
        return [paths.version(name) for name in unread]

    @property
    def other_names(self) -> tuple[str, ...]:
        """What lies beside the versions, at the last look."""
        return self._listed[2]

    def _list(self, root: str) -> frozenset[str]:
        """The versions that there are; read again where the folder has changed."""
        now, stat = time.time_ns(), _stat(root)
        if stat is None or stat != self._listed[0]:
            names, others = _names(root)
            settled = stat is not None and stat[0] + self.margin_ns < now
            self._listed = stat if settled else None, names, others
        return self._listed[1]

    def _sweep(self, root: str) -> None:
        if not self._due:
            # In the order of ids: each comes at the same place of every round.
            self._due = sorted((name for name, each in self.versions.items() if each.state.closed), key=_number, reverse=True)
        until = time.monotonic() + self.sweep_seconds
        for _ in range(min(self.sweep, len(self._due))):
            self._check(root, self._due.pop(), quick=False)
            if time.monotonic() > until:
                break

    def _check(self, root: str, name: str, quick: bool) -> None:
        each = self.versions.get(name)
        if each is None:
            return
        settled = each.taken.whole.settled(self.margin_ns)
        if not settled or not self._same(f"{root}/{name}", each.taken.quick if quick else each.taken.whole):
            self._forget(name)

    def _same(self, folder: str, signature: Signature) -> bool:
        return signature.settled(self.margin_ns) and signature.value is not None and again(folder, signature.names).value == signature.value

    def _forget(self, name: str) -> None:
        self.nodes.pop(name, None)
        self.forget(name)

    def forget(self, name: str) -> None:
        """What was read of a version beyond version.yaml and recipe.yaml."""
        self.changed.add(name)
        self.watched.discard(name)
        if (before := self.versions.pop(name, None)) is not None:
            self._before[name] = before

    def remember(self, name: str, each: Remembered) -> None:
        """A version as it is now."""
        self.versions[name] = each
        self._touched.add(name)
        if each.state.closed and each.taken.whole.settled(self.margin_ns):
            self.watched.discard(name)
        else:
            self.watched.add(name)

    def states(self, nodes: Mapping[str, Node]) -> dict[str, VersionState]:
        """All states, in the order of `nodes`; but for those remembered anew the ones of the look before."""
        if self._states.keys() != nodes.keys():
            self._states = {name: self.versions[name].state for name in nodes}
        elif self._touched:
            self._states = {**self._states, **{name: self.versions[name].state for name in self._touched}}
        self._touched = set()
        return self._states

    def open_states(self) -> tuple[VersionState, ...]:
        """Those that are not closed, in the order of ids."""
        return tuple(state for name in sorted(self.watched, key=_number) if not (state := self.versions[name].state).closed)

    def tree(self, check: Callable[[dict[str, Node]], dict[str, Node]]) -> dict[str, Node]:
        """The tree that `nodes` form, in the order of ids, as `check` makes it of them; made once for the same nodes."""
        differing = self.nodes.keys() != self._tree_of.keys() or any(self.nodes.get(name) != self._tree_of.get(name) for name in self.changed)
        if self._tree is None or differing:
            self.nodes = dict(sorted(self.nodes.items(), key=lambda item: _number(item[0])))
            self._tree = None
            tree = check(self.nodes)
            self._tree, self._tree_of = tree, dict(self.nodes)
            for name in [name for name, each in self.versions.items() if each.state.node != tree[name]]:
                self.forget(name)
        return self._tree

    def depends_on(self, key: tuple[Any, ...]) -> None:
        """Forget all states when what all depend on has changed."""
        if self._key != key:
            for name in list(self.versions):
                self.forget(name)
            self._key = key

    def read(self, name: str, read: Callable[[], VersionState]) -> set[str]:
        """Read a version and remember it; those that are to be read again because they start from its policy."""
        before = self._before.pop(name, None)
        taken = self._taken.pop(name, None) or (before.taken if before else None)
        assert taken is not None, "what is to be read was looked at, or was read before"
        self.remember(name, Remembered.of(read(), taken))
        if before is None or self._tree is None or _hands_on(before.state) == _hands_on(self.versions[name].state):
            return set()
        follow = {each for each, node in self._tree.items() if node.init.partition("@")[0] == name and each in self.versions}
        for each in follow:
            self.forget(each)
        return follow

    def read_looks(self, paths: CampaignPaths) -> tuple[Look, ...]:
        """The ledger of looks. One that lost a look, or has another one in its place, is cause to read all versions again."""
        before = self.looks.items
        found = self.looks.read(paths.look(1).parent, paths.look, lambda known: read_looks(paths, known), self)
        if found is not before and found[: len(before)] != before:
            for name in list(self.versions):
                self.forget(name)
        return found

    def differs(self, rounds: tuple[Round, ...], harnesses: tuple[int, ...]) -> bool:
        """Whether anything is new that versions are checked against one another by."""
        if not self.changed and self._right is not None and self._right[0] is rounds and self._right[1] == harnesses:
            return False
        self._right, self._checking = None, (rounds, harnesses)
        return True

    def found_right(self) -> None:
        """What `differs` was told of last has been checked."""
        self._right = self._checking

    def value(self, folder: Path, read: Callable[[Path], T]) -> T:
        """Something that is read from all files in a folder, read again when one of them changes."""
        name = str(folder)
        found = self._values.get(name)
        if found is None or not self._same(name, found[0]):
            found = self._values[name] = take(name, _left_out), read(folder)
        return found[1]


def _hands_on(state: VersionState) -> tuple[object, ...]:
    """What the versions that start from this one depend on."""
    return state.trained, state.policy, state.policy_identity, state.stopped_early is None


def _parts_of(state: VersionState) -> tuple[str, ...]:
    if state.running is None or state.running.finished:
        return ()
    return tuple(str(incarnation.parts) for status in state.jobs.get("train", []) for incarnation in status.job.incarnations())


def _seen(state: VersionState, parts: Iterable[str]) -> tuple[Any, ...]:
    jobs = ((status.incarnation, status.result is None, status.phase == "recorded") for status in state.jobs.get("train", []))
    return (*jobs, *map(_stat, parts))


def progressed(each: Remembered, jobs_of: VersionState) -> bool:
    """Whether a training run has shown more since `each` was read; `jobs_of`: the version with its jobs as they are now."""
    return _seen(jobs_of, each.parts) != each.seen


def _names(root: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Of versions (a link to a filesystem that is not mounted at present is one, too), and of what else lies there."""
    try:
        with os.scandir(root) as entries:
            found = {entry.name: entry.is_dir() or entry.is_symlink() for entry in entries}
    except FileNotFoundError:
        found = {}
    named = {name for name in found if VERSION_ID.match(name)}
    return frozenset(name for name in named if found[name]), tuple(sorted(found.keys() - named))


def _left_out(name: str) -> bool:
    """What a running job writes all the time, and nothing that the state of a version is read from at rest."""
    parts = name.split("/")
    return len(parts) == 3 and (parts[2] in _LOGS or parts[2].startswith(_INCARNATION))


def _is_record(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == _JOBS


_JOBS = VersionPaths(Path()).job("train", 0).root.parts[0]
_LOGS = {JobPaths(Path()).launch_log.name, JobPaths(Path()).slurm_log.name}
_INCARNATION = JobPaths(Path()).incarnation(0).root.name.removesuffix("0")


def _stat(path: str) -> tuple[int, ...] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ctime_ns, stat.st_size, stat.st_ino


def _number(name: str) -> int:
    return int(name[1:])
