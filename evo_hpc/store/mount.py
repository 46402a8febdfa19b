"""Whether the filesystem of a folder keeps the promises that campaigns rest on, on this machine and between two nodes."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evo_hpc.paths import TEMP_PREFIX
from evo_hpc.store.atomic import NO_HARD_LINKS
from evo_hpc.store.checks import CheckResult, Level

RENAMES = 50
SLOW_SYNC_SECONDS = 1.0
SKEW_SECONDS = 5.0
LARGEST_SKEW_SECONDS = 60.0
"""How far apart clocks may be where jobs are told apart by when they were submitted."""
LITTLE_SPACE_BYTES = 5 << 30
FEW_INODES = 10_000
NETWORK = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "fhgfs", "ceph", "cifs", "smb3", "panfs", "orangefs", "pvfs2", "wekafs",
    "glusterfs", "9p", "virtiofs", "afs",
)
NO_LINKS = ("vfat", "exfat", "msdos", "ntfs", "ntfs3", "fuseblk")
OBJECT_STORES = ("s3fs", "goofys", "gcsfuse", "rclone", "blobfuse", "geesefs", "mountpoint-s3")


@dataclass(frozen=True)
class Filesystem:
    """What a folder lies on, as the kernel says it."""

    kind: str
    source: str
    mount_point: str
    options: tuple[str, ...]

    @property
    def shared(self) -> bool:
        """Whether other machines can see it, as far as its type tells."""
        return self.kind.removeprefix("fuse.") in NETWORK


def filesystem_of(folder: Path, mountinfo: str | None = None) -> Filesystem | None:
    """The mount that `folder` lies on (proc(5): /proc/PID/mountinfo); null when the kernel does not tell."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return None
    target, best = os.path.realpath(folder), None
    for line in mountinfo.splitlines():
        front, dash, back = line.partition(" - ")
        left, right = front.split(" "), back.split(" ")
        if not dash or len(left) < 6 or len(right) < 2:
            continue
        point = _unescaped(left[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.mount_point)):  # a later line lies over an earlier one
            best = Filesystem(right[0], _unescaped(right[1]), point, (*left[5].split(","), *"".join(right[2:3]).split(",")))
    return best


def check_mount(folder: Path, *, many_machines: bool = False) -> list[CheckResult]:
    """All checks on this machine, in a folder of their own inside `folder`, which is removed. `many_machines`: jobs run elsewhere too.

    A folder that cannot be written to is one error; nothing is raised.
    """
    found = check_filesystem(filesystem_of(folder), many_machines)
    try:
        with workplace(folder) as place:
            for check in (check_rename, check_link, check_sync, check_listing, check_clock, check_umask):
                found.append(check(place))
    except OSError as error:
        found.append(_result(
            "write", "error",
            f"{folder}: {error.strerror}",
            "choose a folder that you may write to, or have its owner and mode changed",
        ))
    return [*found, *check_space(folder)]


def check_filesystem(filesystem: Filesystem | None, many_machines: bool) -> list[CheckResult]:
    """What is known of its type before anything is tried."""
    if filesystem is None:
        return [_result("filesystem", "warning", "its type is not known (/proc/self/mountinfo cannot be read)")]
    kind, short = filesystem.kind, filesystem.kind.removeprefix("fuse.")
    where = f"{kind} at {filesystem.mount_point}"
    if "ro" in filesystem.options:
        return [_result("filesystem", "error", f"{where} is mounted read-only", "choose another folder")]
    if short in OBJECT_STORES:
        return [_result(
            "filesystem", "error",
            f"{where}: an object store, which has no atomic rename and no hard links",
            "choose a folder on a POSIX filesystem",
        )]
    if short in NO_LINKS:
        return [_result(
            "filesystem", "error",
            f"{where} has no hard links, by which write-once records are committed",
            "choose a folder on another filesystem",
        )]
    if kind in ("nfs", "nfs4"):
        return [_nfs(filesystem, where)]
    if many_machines and kind in ("tmpfs", "ramfs", "overlay"):
        return [_result(
            "filesystem", "warning",
            f"{where} is seen by this machine alone, and is lost with it",
            "put the campaign on a filesystem that all nodes share",
        )]
    if many_machines and not filesystem.shared:
        return [_result("filesystem", "warning", f"{where}: of a type that is usually one machine's own; jobs on other nodes must see it too",
                        "if it is not exported to the nodes, put the campaign on a filesystem that they share")]
    return [_result("filesystem", "ok", where)]


def _nfs(filesystem: Filesystem, where: str) -> CheckResult:
    """Other machines' new files show up late there, as long as attributes and names are cached (nfs(5): acdirmax, lookupcache)."""
    options = dict(word.partition("=")[::2] for word in filesystem.options)
    if "noac" in options or options.get("actimeo") == "0" or options.get("lookupcache") == "none" or options.get("acdirmax") == "0":
        return _result("filesystem", "ok", f"{where}, without caching of names")
    seconds = options.get("acdirmax") or options.get("actimeo") or "60"
    return _result(
        "filesystem", "warning",
        f"{where} caches names: what one node writes, another may see up to {seconds} s later",
        "nothing is lost by it, but everything between nodes takes that much longer; mount with actimeo=1 or lookupcache=none where you can",
    )


def check_rename(place: Path) -> CheckResult:
    """A rename over an existing file: whoever reads meanwhile finds the old or the new one, whole."""
    final, bad, stop = place / "renamed", [], threading.Event()
    final.write_bytes(b"0" * 4096)

    def read() -> None:
        while not stop.is_set():
            try:
                seen = final.read_bytes()
            except OSError as error:
                bad.append(error.strerror or "unreadable")
            else:
                if len(seen) != 4096 or len(set(seen)) != 1:
                    bad.append("a torn file")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(1, RENAMES + 1):
            temp = place / f"new-{number}"
            temp.write_bytes(str(number % 10).encode() * 4096)
            os.replace(temp, final)
    except OSError as error:
        bad.append(f"refused: {error.strerror}")
    finally:
        stop.set()
        reader.join()
    if bad:
        return _result(
            "rename", "error",
            f"a file that is replaced by a rename was not always there and whole ({bad[0]}, {len(bad)} times)",
            "choose a folder on another filesystem",
        )
    return _result("rename", "ok", f"atomic over an existing file ({RENAMES} times under a reader)")


def check_link(place: Path, link: Callable[[Path, Path], None] = os.link) -> CheckResult:
    """Exclusive create by link(2): the second is refused."""
    first, second, final = place / "first", place / "second", place / "linked"
    first.write_text("first")
    second.write_text("second")
    another = "choose a folder on a filesystem with hard links"
    try:
        link(first, final)
    except OSError as error:
        known = error.errno in NO_HARD_LINKS
        return _result(
            "link", "error",
            f"hard links are {'not supported' if known else 'refused'} here ({error.strerror}); write-once records are committed by them",
            another,
        )
    try:
        link(second, final)
    except FileExistsError:
        if final.read_text() == "first" and final.stat().st_ino == first.stat().st_ino:
            return _result("link", "ok", "a second link to a name is refused")
    except OSError as error:
        return _result("link", "error", f"a second link to a name failed in an unexpected way ({error.strerror})", another)
    return _result("link", "error", "a second link to a name replaced the first: two controllers could both commit a record", another)


def check_sync(place: Path, sync: Callable[[int], None] = os.fsync) -> CheckResult:
    """fsync of a file and of its folder."""
    begin = time.perf_counter()
    with (place / "synced").open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        try:
            sync(file.fileno())
        except OSError as error:
            return _result(
                "fsync", "error",
                f"refused ({error.strerror}): what was written may be lost with the machine",
                "choose a folder on another filesystem",
            )
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    except OSError as error:
        return _result("fsync", "warning", f"of files, but not of folders ({error.strerror}): a rename may be lost with the server")
    finally:
        os.close(descriptor)
    seconds = time.perf_counter() - begin
    if seconds > SLOW_SYNC_SECONDS:
        return _result(
            "fsync", "warning",
            f"takes {seconds:.1f} s for a small file and its folder; every record waits for it",
            "look for a busy or failing server",
        )
    return _result("fsync", "ok", f"of a file and its folder in {seconds * 1000:.1f} ms")


def check_listing(place: Path, listing: Callable[[Path], list[str]] = os.listdir) -> CheckResult:
    """What this machine creates and removes shows in a listing at once."""
    path = place / "listed"
    path.touch()
    seen = path.name in listing(place)
    path.unlink()
    if not seen or path.name in listing(place):
        return _result(
            "listing", "error",
            "a file that was just created or removed is not listed so on the same machine",
            "mount the filesystem with less caching",
        )
    return _result("listing", "ok", "shows a new file at once")


def check_clock(place: Path, clock: Callable[[], float] = time.time) -> CheckResult:
    """The server's clock against this machine's: what a new file's time of change says."""
    path = place / "clock"
    before = clock()
    path.write_text("x")
    after = clock()
    changed = path.stat().st_mtime
    skew = changed - min(max(changed, before), after)
    if abs(skew) <= SKEW_SECONDS:
        return _result("clock", "ok", f"this machine and the filesystem agree within {max(abs(skew), 0.01):.2f} s")
    level: Level = "error" if abs(skew) > LARGEST_SKEW_SECONDS else "warning"
    return _result(
        "clock", level,
        f"the filesystem's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's",
        "have both set by NTP",
    )


def check_umask(place: Path, wanted: int = 0o666) -> CheckResult:
    """Whether new files get the mode that the umask leaves: a filesystem that invents modes locks colleagues out, or lets them in."""
    path = place / "umask"
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, wanted))
    got, expected = path.stat().st_mode & 0o777, 0o666 & ~_umask()
    if got == expected:
        return _result("umask", "ok", f"honoured (new files are {got:04o})")
    return _result(
        "umask", "warning",
        f"new files are {got:04o} where the umask asks for {expected:04o}",
        "a default ACL or a mount option decides; make sure the right people can read and write",
    )


def check_space(folder: Path, *, little_bytes: int = LITTLE_SPACE_BYTES) -> list[CheckResult]:
    """Free bytes and inodes for this user."""
    try:
        free, stat = shutil.disk_usage(folder).free, os.statvfs(folder)
    except OSError as error:
        return [_result("space", "error", f"{folder}: {error.strerror}")]
    amount = f"{free / 2**30:.1f} GiB free"
    if free < little_bytes:
        return [_result("space", "warning", amount, "free some: checkpoints and policies take most")]
    if stat.f_files and stat.f_favail < FEW_INODES:
        return [_result(
            "space", "warning",
            f"{amount}, but {stat.f_favail} files can still be made",
            "remove files, or ask for a higher quota of inodes",
        )]
    return [_result("space", "ok", amount)]


@contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """A folder for the tests; its name makes it swept later should it be left behind."""
    place = folder / f"{TEMP_PREFIX}mount.{os.uname().nodename.split('.')[0]}.{os.getpid()}.{secrets.token_hex(4)}"
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _umask() -> int:
    """Of this process, without the moment of another one that setting and resetting it makes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    raise OSError(0, "the kernel does not tell the umask")


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _result(what: str, level: Level, text: str, remedy: str | None = None) -> CheckResult:
    return CheckResult(f"mount: {what}", level, text, remedy)


if __name__ == "__main__":  # what srun runs on each node: python -m evo_hpc.store.mount FOLDER --peer 2
    from evo_hpc.store.mount_peers import main

    main()
