"""What a run on this machine needs, looked for before anything is started: a missing package found late costs minutes."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from evo_hpc.config.cluster import Cluster
from evo_hpc.domains.tokenizer import ChatTokenizer
from evo_hpc.errors import UserError
from evo_hpc.training.architectures import read_config, shape_of

NEEDED = {"torch": "training", "megatron.core": "training", "vllm": "sampling"}
MIN_FREE_BYTES = 200 << 20


class NotReady(UserError):
    """This machine lacks something that the jobs need."""


def check_machine(cluster: Cluster, folder: Path) -> None:
    """Raise NotReady, listing everything that is missing. Jobs with an interpreter of their own are not judged here."""
    problems = []
    if cluster.executor == "slurm":
        pass  # what the nodes have is for `evo-hpc doctor --cluster` to say
    elif cluster.python is None:
        problems += [
            f"{name} is not installed ({purpose} needs it): run `make setup`, or install evo-hpc with the extra `cpu` or `gpu`"
            for name, purpose in NEEDED.items() if not _installed(name)
        ]
    elif cluster.python is not None and shutil.which(cluster.python) is None:
        problems.append(f"cluster.yaml: python: {cluster.python} is not an executable")
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        problems.append(f"{folder}: {free >> 20} MiB free on this filesystem; at least {MIN_FREE_BYTES >> 20} MiB are needed")
    if problems:
        raise NotReady("\n".join(problems))


def check_model(folder: Path) -> None:
    """Raise what a job would raise on a model folder, minutes earlier: UnsupportedModelError, TokenizerError, VocabularyError.

    Weights are not looked at. A config.json that names no model_type is left for the job to refuse.
    """
    config = read_config(folder)
    if "model_type" in config:
        shape_of(config, str(folder / "config.json"))
        ChatTokenizer.from_folder(folder)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
