"""Where a job's live traffic goes: shared memory when there is room, else the folder the profile names or the job's own.

Policies pass through it, so its folders belong to this user alone: whoever could write there could swap the weights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

from evo_hpc.config.cluster import Cluster
from evo_hpc.config.recipe import Recipe
from evo_hpc.errors import UserError
from evo_hpc.jobs.spec import JobSpec
from evo_hpc.paths import SHARED_MEMORY, CampaignPaths, ExchangePaths, IncarnationPaths, JobPaths, OwnerPaths
from evo_hpc.store.atomic import read_json

_TRAFFIC_BYTES = 64 << 20
"""Room for requests and rollouts, beside the policies."""
_POLICIES = 3
"""Policies in the exchange at once, where nothing is stale: two published ones and the one being written."""


class UnsafeExchange(UserError):
    """A folder of the exchange is, or could be, in other hands. Names the path."""


def exchange_bytes(job: JobPaths, spec: JobSpec) -> int:
    """Bytes that a job's exchange may come to hold: its traffic, and for training the policies that pass through it. Both grow with how
    stale rollouts may be: so many steps are under way, and so many policies may still be asked for."""
    if spec.kind != "train":
        return _TRAFFIC_BYTES
    recipe = Recipe.model_validate(spec.params.get("recipe", {}))
    stale, init = recipe.rollout.max_staleness, CampaignPaths.of_job(job).root / spec.params["init"]
    policy = sum(path.stat().st_size for path in init.rglob("*") if path.is_file())
    if recipe.compute.precision != "bfloat16" and stored_in_16_bits(init):
        policy *= 2  # published as it is computed
    return _TRAFFIC_BYTES * (1 + stale) + policy * (_POLICIES + stale)


def stored_in_16_bits(folder: Path) -> bool:
    """Whether a model folder's config.json says that its weights are of a 16-bit type."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    return str(config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")


def make_exchange(cluster: Cluster, job_name: str, incarnation: IncarnationPaths, *, need_bytes: int) -> ExchangePaths:
    """A fresh exchange folder, open to this user alone; what dead incarnations of the same job left is removed first.

    Shared memory is taken where more than `need_bytes` are free, else the job folder; a folder that the profile names
    is taken as it is. Raises UnsafeExchange when somebody else made, or could replace, a folder on the way.
    """
    job = JobPaths(incarnation.root.parent)
    base = SHARED_MEMORY if cluster.exchange is None else Path(cluster.exchange)
    if cluster.exchange is not None:
        try:
            base.mkdir(parents=True, exist_ok=True)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise UserError(f"{base}: cannot be the exchange folder ({error.strerror}); "
                            "change `exchange` in cluster.yaml") from error
    _sweep(base, job, incarnation.number)
    if cluster.exchange is None and not (_usable(base) and shutil.disk_usage(base).free > need_bytes):
        root = incarnation.exchange  # as safe as the campaign that it lies in
        root.mkdir(mode=0o700)
    else:
        if not _usable(base):
            raise UnsafeExchange(f"{base}: cannot be written, or others may replace what lies in it; set its sticky bit "
                                 "(chmod +t), or set `exchange` in cluster.yaml to a folder of yours")
        root = _user_folder(base) / f"{job_name}{_suffix(job, incarnation.number)}"
        _make_private(root.parent)
        root.mkdir(mode=0o700)  # a folder that is there already is not fresh
        _make_private(root)
    exchange = ExchangePaths(root)
    for folder in exchange.folders():
        folder.mkdir(mode=0o700)
    return exchange


def _user_folder(base: Path) -> Path:
    return base / f"evo_hpc-{os.getuid()}"


def _suffix(job: JobPaths, number: int) -> str:
    """Of this very folder: a campaign that was copied by hand has the same job names."""
    return f"-{hashlib.sha256(os.fsencode(job.root.resolve())).hexdigest()[:12]}-inc-{number}"


def _sweep(base: Path, job: JobPaths, number: int) -> None:
    """Remove what incarnations before the `number`-th, and earlier attempts at the same work, left; nobody else's files."""
    attempts = [OwnerPaths(job.owner).job(job.kind, attempt) for attempt in range(job.attempt)]
    dead = [inc for each in (*attempts, job) for inc in each.incarnations() if each is not job or inc.number <= number]
    for incarnation in dead:
        shutil.rmtree(incarnation.exchange, ignore_errors=True)
    folder = _user_folder(base)
    if not os.path.lexists(folder):
        return
    _make_private(folder)
    suffixes = tuple(_suffix(JobPaths(incarnation.root.parent), incarnation.number) for incarnation in dead)
    for path in folder.iterdir():
        if path.name.endswith(suffixes):
            shutil.rmtree(path, ignore_errors=True)  # an incarnation that is just ending removes its own


def _usable(base: Path) -> bool:
    """Whether this user can write there, and no other can rename what this user makes there."""
    mode = base.stat().st_mode if base.is_dir() else 0
    return os.access(base, os.W_OK | os.X_OK) and (not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX))


def _make_private(folder: Path) -> None:
    """Make a folder of mode 0700, or see that the one that is there is real, this user's, and closed to others."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    found = folder.lstat()  # not what a link leads to
    advice = ("so others could swap the weights that pass through it; remove it, or set `exchange` in cluster.yaml to a "
              "folder of yours")
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeExchange(f"{folder}: is a link or a file, not a folder, {advice}")
    if found.st_uid != os.getuid():
        raise UnsafeExchange(f"{folder}: belongs to user {found.st_uid}, not to you ({os.getuid()}), {advice}")
    if found.st_mode & 0o077:
        folder.chmod(0o700)
        if folder.lstat().st_mode & 0o077:
            raise UnsafeExchange(f"{folder}: this filesystem keeps it open to others, {advice}")
