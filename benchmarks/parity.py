"""Do TRL's GRPOTrainer and ours learn alike? The same base policy, prompts, reward and hyper-parameters, several seeds of each, and an
equivalence test whose margin was fixed before anything was run.

Endpoint: the train score (share of right answers of the rollouts, which are on-policy) over the last LAST steps of a run. Two one-sided
t-tests (TOST, Schuirmann 1987, J. Pharmacokinet. Biopharm. 15:657) with Welch's degrees of freedom, each at 5 %: equivalent where the 90 %
interval of the difference lies within +-MARGIN. A seed fixes the prompts of both sides, but not what is sampled, so runs are not paired.

What differs beside the code: TRL samples with transformers, and divides by the group's standard deviation + 1e-4 (ours + 1e-6).

Usage: python -m benchmarks.parity --venv FOLDER --out FOLDER [--seeds 8] [--steps 40]. Runs that are in --out are not done again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import grpo_trl
from benchmarks.grpo_ours import Bench
from benchmarks.grpo_setting import Setting
from evo_hpc.lineage.identity import policy_identity
from evo_hpc.paths import SHARED_MEMORY

MARGIN = 0.05
"""Train score: a difference of less than five points is none. Twice the learning rate makes about ten in the demo."""
ALPHA = 0.05
"""Of each of the two tests."""
LAST = 10
SUPERVISED: dict[str, Any] = {"steps": 240, "batch_size": 64, "lr": 1e-3, "seed": 0}
"""The base policy of the demo: a middling one."""


@dataclass(frozen=True)
class Equivalence:
    """The outcome of both tests on two samples."""

    n_ours: int
    n_trl: int
    mean_ours: float
    mean_trl: float
    difference: float
    """mean_ours - mean_trl."""
    low: float
    high: float
    """Of the interval with confidence 1 - 2 alpha."""
    margin: float
    p_value: float
    """The larger of the two tests'."""
    equivalent: bool


def tost(ours: list[float], trl: list[float], margin: float = MARGIN, alpha: float = ALPHA) -> Equivalence:
    """Welch's two one-sided tests of |difference of means| < margin. Each side needs at least two values."""
    import math

    from scipy import stats

    a, b = statistics.variance(ours) / len(ours), statistics.variance(trl) / len(trl)
    difference, error = statistics.mean(ours) - statistics.mean(trl), math.sqrt(a + b)
    if error == 0:
        p, half = float(abs(difference) >= margin), 0.0
    else:
        freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(trl) - 1))
        p = float(max(stats.t.sf((difference + margin) / error, freedom), stats.t.cdf((difference - margin) / error, freedom)))
        half = float(stats.t.ppf(1 - alpha, freedom)) * error
    return Equivalence(
        len(ours), len(trl), statistics.mean(ours), statistics.mean(trl), difference, difference - half, difference + half, margin, p, p < alpha,
    )


def endpoint(curve: list[float]) -> float:
    """Of one run: the mean train score of its last steps."""
    return statistics.mean(curve[-LAST:])


def setting_of(model: Path, seed: int, arguments: argparse.Namespace) -> Setting:
    """The demo's recipe at twice its learning rate, which has more to show in few steps."""
    return Setting(
        str(model), arguments.steps, arguments.prompts, arguments.group_size, max_tokens=64, seed=seed, threads=arguments.threads, lr=4e-5,
    )


def our_curve(bench: Bench, setting: Setting) -> list[float]:
    return [row["score_mean"] for row in bench.train(setting, f"v{setting.seed + 1:04d}").rows]


def trl_curve(bench: Bench, setting: Setting, python: Path, folder: Path) -> list[float]:
    asked, out = folder / f"trl-{setting.seed}.json", folder / f"trl-{setting.seed}.jsonl"
    setting.write(asked, bench.paths.tasks("train"), out)
    return [row["score_mean"] for row in grpo_trl.run(python, asked, out, setting.threads)]


def curves(arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    """All runs, in turns; each is written down once it is done."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    python = grpo_trl.make_venv(arguments.venv, tuple(arguments.pip))
    found: dict[str, list[list[float]]] = {"ours": [], "trl": []}
    with tempfile.TemporaryDirectory(prefix="evo-parity-") as temporary, tempfile.TemporaryDirectory(prefix="evo-parity-", dir=SHARED_MEMORY) as shared:
        folder = Path(temporary)
        bench = Bench.make(folder / "campaign", Path(shared), supervised=SUPERVISED)
        model = arguments.model or out / "model"
        if not model.exists():
            shutil.copytree(bench.supervise(arguments.threads), model)
        for seed in range(arguments.seeds):
            setting = setting_of(model, seed, arguments)
            asked = {**asdict(setting), "model": policy_identity(model)}
            for side in ("ours", "trl") if seed % 2 == 0 else ("trl", "ours"):
                path = out / f"{side}-{seed}.json"
                if not path.exists():
                    curve = our_curve(bench, setting) if side == "ours" else trl_curve(bench, setting, python, folder)
                    path.write_text(json.dumps({"setting": asked, "curve": curve}))
                    print(f"{side} seed {seed}: {curve[0]:.3f} to {endpoint(curve):.3f}", flush=True)
                known = json.loads(path.read_text())
                if known["setting"] != asked:
                    raise SystemExit(f"{path}: of another setting; give another --out")
                found[side].append(known["curve"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment with TRL; made if absent")
    parser.add_argument("--pip", action="append", default=[], help="extra argument of pip for that environment")
    parser.add_argument("--out", type=Path, required=True, help="folder for the curves")
    parser.add_argument("--model", type=Path, help="base policy; left out: the demo's, made anew")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    arguments = parser.parse_args()
    if arguments.model is not None:
        arguments.model = arguments.model.resolve()
    found = curves(arguments)
    mean = {side: [statistics.mean(scores) for scores in zip(*runs, strict=True)] for side, runs in found.items()}
    print("step   ours    TRL")
    for step in range(0, arguments.steps, max(1, arguments.steps // 10)):
        print(f"{step + 1:>4} {mean['ours'][step]:>6.3f} {mean['trl'][step]:>6.3f}")
    if arguments.seeds < 2:
        print("one seed says nothing about a difference: no test")
        return
    ends = {side: [endpoint(run) for run in runs] for side, runs in found.items()}
    result = tost(ends["ours"], ends["trl"])
    (arguments.out / "result.json").write_text(json.dumps({**asdict(result), "endpoints": ends, "last": LAST}, indent=1))
    print(f"last {LAST} steps: ours {result.mean_ours:.3f}, TRL {result.mean_trl:.3f}, difference {result.difference:+.3f}, 90 % interval "
          f"[{result.low:+.3f}, {result.high:+.3f}], margin {MARGIN}: {'equivalent' if result.equivalent else 'not shown to be equivalent'} "
          f"(p = {result.p_value:.2g}, n = {result.n_ours} and {result.n_trl})")


if __name__ == "__main__":
    main()
