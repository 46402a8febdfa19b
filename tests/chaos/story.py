"""A cluster, real or simulated, that a scenario is played on; what it showed, and what of that must be the same everywhere."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SQUEUE = "--format=%F|%K|%j|%T|%r|%V|%S|%e|%N|%D|%i"
SACCT = "--format=JobIDRaw,JobID,JobName,State,ExitCode,Submit,Start,End,ElapsedRaw,AllocTRES,NodeList"
TRANSIENT = ("None", "Priority", "Resources", "BeginTime", "PartitionConfig")
"""Reasons to wait that depend on the moment. (PartitionConfig stands for a moment where PartitionTimeLimit follows.)"""
Shown = dict[str, dict[str, Any]]
"""By job (array tasks: name.index): squeue's [state, reason] or null, and sacct's [state, exit code] rows."""


@dataclass
class World:
    """A cluster that a scenario is played on, and what was seen of it."""

    folder: Path
    environment: dict[str, str]
    quiet: float
    """Seconds without a change after which what is shown counts as settled."""
    poll: float
    preempt: Callable[[World, str], None]
    """Makes the cluster preempt the job of an id."""
    patience: float = 60.0
    """Seconds that anything may take."""
    names: dict[str, str] = field(default_factory=dict)
    """Job name -> its word in the recording."""
    ids: dict[str, str] = field(default_factory=dict)
    timeline: list[Shown] = field(default_factory=list)
    rests: list[Shown] = field(default_factory=list)
    commands: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tag = f"rec{os.getpid():x}{time.time_ns() % 16**6:06x}"
        self.since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 5))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """One command of Slurm."""
        environment = {**self.environment, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
        return subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, timeout=120)

    def say(self, *command: str) -> str:
        """A command whose answer belongs to the recording."""
        done = self.run(*command)
        self.commands.append({"command": self._plain(" ".join(command)), "code": done.returncode,
                              "out": self._plain(done.stdout), "err": self._plain(done.stderr)})
        return done.stdout

    def submit(self, word: str, body: str, *options: str, name: str | None = None) -> str:
        """Submit a script, its options as #SBATCH lines; the id, or an empty text when it was refused."""
        own = name or f"{self.tag}-{word}"
        self.names[own] = word
        named = () if any(o.startswith("--job-name") for o in options) else (f"--job-name={own}",)
        output = () if any(o.startswith("--output") for o in options) else (f"--output={self.folder}/{word}.out", "--open-mode=append")
        lines = ["#!/bin/bash", *(f"#SBATCH {o}" for o in (*named, *output, "--time=5", *options)),
                 f'echo "start ${{SLURM_RESTART_COUNT:-0}} ${{SLURM_ARRAY_TASK_ID:-}}" >> "{self.folder}/{word}.log"', body]
        script = self.folder / f"{word}.sh"
        script.write_text("\n".join(lines) + "\n")
        out = self.say("sbatch", "--parsable", str(script)).strip()
        if out:
            self.ids[out] = word
            self.commands[-1]["out"] = self._plain(self.commands[-1]["out"])
        return out

    def _plain(self, text: str) -> str:
        for number, word in self.ids.items():
            text = re.sub(rf"\b{number}(?![0-9])", f"<{word}>", text)
        return text.replace(str(self.folder), "<folder>").replace(self.tag, "<tag>")

    def look(self) -> Shown:
        """What squeue and sacct show of the scenario's jobs now; remembered when it differs from what they showed before."""
        user = pwd.getpwuid(os.getuid()).pw_name
        squeue = self.run("squeue", "--noheader", "--array", "--states=all", f"--user={user}", SQUEUE)
        sacct = self.run("sacct", "--noheader", "--parsable2", "--duplicates", "--allocations", f"--user={user}",
                         f"--starttime={self.since}", SACCT)
        assert squeue.returncode == sacct.returncode == 0, squeue.stderr + sacct.stderr
        seen: Shown = {}
        for line in squeue.stdout.splitlines():
            number, index, name, state, reason = line.split("|")[:5]
            if name in self.names:
                label = self.names[name] + ("" if index == "N/A" else f".{index}")
                seen.setdefault(label, {"squeue": None, "sacct": []})["squeue"] = [state, reason]
        for line in sacct.stdout.splitlines():
            raw, number, name, state, code = line.split("|")[:5]
            if name in self.names:
                label = self.names[name] + ("" if "_" not in number else f".{number.partition('_')[2]}")
                state = re.sub(rf"by {os.getuid()}\b", "by UID", state)
                seen.setdefault(label, {"squeue": None, "sacct": []})["sacct"].append([state, code])
        if not self.timeline or self.timeline[-1] != seen:
            self.timeline.append(seen)
        return seen

    def until(self, ready: Callable[[Shown], Any]) -> None:
        """Look until something is so."""
        end = time.monotonic() + self.patience
        while not ready(self.look()):
            assert time.monotonic() < end, f"not in {self.patience} s: {self.timeline[-1:]}"
            time.sleep(self.poll)

    def state(self, *words: str, of: str = "a") -> None:
        """Look until squeue says one of these states of a job."""
        self.until(lambda seen: (seen.get(of, {}).get("squeue") or [None])[0] in words)

    def started(self, times: int = 1, of: str = "a") -> None:
        """Look until a job's script has begun so many times."""
        self.until(lambda seen: len(self.log(of)) >= times)

    def accounted(self, of: str = "a") -> None:
        """Look until sacct shows a job, which may take it several seconds."""
        self.until(lambda seen: seen.get(of, {}).get("sacct"))

    def rest(self) -> None:
        """Look until nothing has changed for a while, and keep what is shown then."""
        seen, since = self.look(), time.monotonic()
        while time.monotonic() - since < self.quiet:
            time.sleep(self.poll)
            new = self.look()
            if new != seen:
                seen, since = new, time.monotonic()
        self.rests.append(seen)

    def log(self, word: str) -> list[str]:
        """What a job's script wrote of itself."""
        path = self.folder / f"{word}.log"
        return path.read_text().splitlines() if path.exists() else []

    def outcome(self) -> dict[str, Any]:
        """All of it as a record, free of ids, times and paths."""
        labels = sorted({label for seen in self.timeline for label in seen})
        return {
            "jobs": {label: _changes([seen.get(label) for seen in self.timeline]) for label in labels},
            "rests": self.rests, "commands": self.commands,
            "logs": {word: sorted(self.log(word)) if "." in word else self.log(word) for word in sorted(set(self.names.values()))},
        }


def _changes(entries: list[Any]) -> list[Any]:
    return [entry for i, entry in enumerate(entries) if i == 0 or entry != entries[i - 1]]


def essence(outcome: dict[str, Any]) -> dict[str, Any]:
    """What must be the same on every cluster: what is shown at rest, the order of states, answers, and what the scripts lived through."""
    jobs = {}
    for label, entries in outcome["jobs"].items():
        states = [entry["squeue"] for entry in entries if entry and entry["squeue"]]
        # A moment of running or completing, or of waiting before the first start, is seen or missed by chance; what rests, is in `rests`.
        states = [[s, "waits"] if s == "PENDING" and r in TRANSIENT else [s, r] for s, r in states if s not in ("COMPLETING", "CONFIGURING", "RUNNING")]
        # The wait after a release is as short.
        states = [s for i, s in enumerate(states) if s[1] != "waits" or i == 0 or not states[i - 1][1].startswith("JobHeld")]
        states = _changes(states)
        jobs[label] = states[1:] if states[:1] == [["PENDING", "waits"]] else states
    return {"jobs": {k: v for k, v in jobs.items() if v}, "rests": outcome["rests"], "commands": outcome["commands"],
            "logs": {word: sorted(lines) if any(label.startswith(f"{word}.") for label in jobs) else lines for word, lines in outcome["logs"].items()}}
