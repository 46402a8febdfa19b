"""How often a nominal 95 % interval of a paired difference covers the truth, by number of tasks and method. Simulated.

Two versions are evaluated with k rollouts a task. Tasks differ in difficulty (a mix of easy and hard ones, or mostly
hard); the second version is better by `shift` logits. The truth is the mean difference over the population of tasks.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from scipy.special import expit

from evo_hpc.stats.intervals import mean_confidence

METHODS = ("t", "studentized", "bca", "percentile")
SUITES = {"bimodal": ((-2.0, 0.5), (2.0, 0.5)), "hard": ((-3.0, 0.8), (0.0, 0.2))}
"""Name -> (centre in logits, weight) of the two kinds of task; each kind has a spread of 1 logit."""
SPREAD, POPULATION = 1.0, 400_000


def difficulties(suite: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Logits of `count` tasks."""
    (low, weight), (high, _) = SUITES[suite]
    return np.where(rng.random(count) < weight, low, high) + SPREAD * rng.normal(size=count)


def covered(suite: str, shift: float, tasks: int, k: int, draws: int, suites: int, seed: int) -> dict[str, float]:
    """Share of simulated suites whose interval holds the truth, in percent."""
    rng = np.random.default_rng(seed)
    logits = difficulties(suite, POPULATION, rng)
    truth = float(np.mean(expit(logits + shift) - expit(logits)))
    hits = dict.fromkeys(METHODS, 0)
    for _ in range(suites):
        own = difficulties(suite, tasks, rng)
        differences = (rng.binomial(k, expit(own + shift)) - rng.binomial(k, expit(own))) / k
        for method in METHODS:
            found = mean_confidence(differences, method=method, draws=draws, alpha=0.05, rng=rng)
            hits[method] += found.low <= truth <= found.high
    return {method: round(100 * count / suites, 1) for method, count in hits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[18, 30, 77, 160])
    parser.add_argument("--samples", type=int, default=8, help="rollouts a task")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--suites", type=int, default=1000, help="simulated suites a cell")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cells = [
        {"suite": suite, "shift": shift, "tasks": tasks,
         **covered(suite, shift, tasks, arguments.samples, arguments.draws, arguments.suites, seed=tasks)}
        for suite in SUITES for shift in (0.0, 1.0) for tasks in arguments.tasks
    ]
    if arguments.json:
        print(json.dumps(cells, indent=1))
        return
    print(f"{'suite':>8} {'shift':>5} {'tasks':>5} " + " ".join(f"{m:>11}" for m in METHODS))
    for cell in cells:
        print(f"{cell['suite']:>8} {cell['shift']:>5} {cell['tasks']:>5} " + " ".join(f"{cell[m]:>11}" for m in METHODS))


if __name__ == "__main__":
    main()
