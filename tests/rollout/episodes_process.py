"""Rollouts of two turns from a real engine, in a process of its own: `python episodes_process.py POLICY OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from evo_hpc.config.recipe import Reward
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.rollout.engine import Engine
from evo_hpc.rollout.groups import Group, Sampler
from evo_hpc.rollout.records import Sampling
from tests.rollout.test_episodes import COMMON, TASK, Trying

if __name__ == "__main__":
    policy = Path(sys.argv[1])
    tokenizer = ChatTokenizer.from_folder(policy)
    engine = Engine(policy, max_model_len=120)
    sampler = Sampler(engine, tokenizer, Trying(), Sampling(0.7, 1.0, 60, tokenizer.eos_ids), Reward(), max_turns=2)  # type: ignore[arg-type]
    rows = sampler.rows([Group("g", TASK, tuple(range(40)))], COMMON)
    again = sampler.rows([Group("g", TASK, tuple(range(0, 40, 2)))], COMMON)
    # A seed's rollout is the same in other company.
    assert [row["response_ids"] for row in again] == [row["response_ids"] for row in rows[::2]]
    Path(sys.argv[2]).write_text(json.dumps(rows))
    engine.close()
