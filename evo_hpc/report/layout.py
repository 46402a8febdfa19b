"""Where each version stands in the picture of the tree: columns by depth, lines of descent packed into few rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A version's cell in the grid."""

    column: int
    """Longest way from a root, so that a merge stands to the right of all its parents."""
    row: int
    lane: int = 0
    """Which of the parallel tracks beside its first parent's column the edge from there turns in."""


def place(parents: Mapping[str, Sequence[str]], main: str | None = None) -> dict[str, Place]:
    """A cell for each version, no cell twice; `parents`: in the order of the ids, `main`: the version whose line runs straight.

    A line of descent stays in one row, and that row is free from where the line branches off to where it ends: the edge
    to a first parent passes no other version.
    """
    return _Grid(parents, main).places()


class _Grid:
    def __init__(self, parents: Mapping[str, Sequence[str]], main: str | None) -> None:
        self.parents = parents
        self.children: dict[str, list[str]] = {name: [] for name in parents}
        for name, own in parents.items():
            if own:
                self.children[own[0]].append(name)
        self.main = set()
        while main is not None:
            self.main.add(main)
            main = parents[main][0] if parents[main] else None
        self.column: dict[str, int] = {}
        self.height: dict[str, int] = {}
        self.row: dict[str, int] = {}
        self.lane: dict[str, int] = {}
        self.taken: dict[int, list[tuple[int, int]]] = {}
        """Row -> first and last column of each line in it."""
        self.turns: dict[int, list[tuple[int, int, str, int]]] = {}
        """Column -> first and last row, parent and lane of each edge that turns to the right of it."""

    def places(self) -> dict[str, Place]:
        for name in self.parents:
            self._depth(name)
        for name in sorted(self.parents, key=lambda name: -self.column[name]):
            self.height[name] = 1 + max((self.height[child] for child in self.children[name]), default=0)
        for root in sorted((name for name, own in self.parents.items() if not own), key=lambda name: name not in self.main):
            self._line(root, 0, 0)
        return {name: Place(self.column[name], self.row[name], self.lane.get(name, 0)) for name in self.parents}

    def _depth(self, name: str) -> int:
        if name not in self.column:
            self.column[name] = 1 + max((self._depth(parent) for parent in self.parents[name]), default=-1)
        return self.column[name]

    def _following(self, name: str) -> list[str]:
        """The main line goes straight on; of other lines the longest, so that fewer edges turn."""
        return sorted(self.children[name], key=lambda child: (child not in self.main, -self.height[child]))

    def _line(self, start: str, first_column: int, least_row: int) -> None:
        """Put a line into the first row with room for it, then what branches off: the later, the nearer."""
        line = [start]
        while following := self._following(line[-1]):
            line.append(following[0])
        span = (first_column, self.column[line[-1]])
        row = least_row
        while any(span[0] <= last and first <= span[1] for first, last in self.taken.get(row, ())):
            row += 1
        self.taken.setdefault(row, []).append(span)
        self.row.update(dict.fromkeys(line, row))
        if self.parents[start]:
            self.lane[start] = self._turn(self.parents[start][0], row)
        for name in reversed(line):
            for child in self._following(name)[1:]:
                self._line(child, self.column[name] + 1, row + 1)

    def _turn(self, parent: str, row: int) -> int:
        """The first track that no other parent's edges use between the two rows."""
        turns, rows = self.turns.setdefault(self.column[parent], []), (self.row[parent], row)
        others = {lane for first, last, other, lane in turns if other != parent and rows[0] <= last and first <= rows[1]}
        lane = next(lane for lane in range(len(turns) + 1) if lane not in others)
        turns.append((*rows, parent, lane))
        return lane
