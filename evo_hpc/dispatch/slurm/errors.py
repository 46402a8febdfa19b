"""How a Slurm command fails, typed by what the caller may conclude: nothing, a definite no, or a no that passes by itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from evo_hpc.errors import EvoError, Failure, UserError

LONGEST_WORDS = 600
"""Characters of Slurm's words that a message repeats."""

_UNANSWERED = (
    # The transport (slurm_errno.h, 1000-1099 and 5000-5019): the request may have arrived though the answer did not.
    "Unable to contact slurm controller", "Communication connection failure", "Communication shutdown failure", "Socket timed out",
    "Zero Bytes were transmitted", "Message send failure", "Message receive failure", "Unexpected message received", "Insane message length",
    "Received zero length message", "Received message length < 0", "Failed to send entire message", "Header lengths are longer",
    "Unexpected missing socket", "Can't find an address", "Protocol authentication error", "Unspecified error", "Operation now in progress",
    # A controller that is starting, stopping or standing by.
    "in standby mode", "unable to load job state information", "Slurm internal error",
    # munge: it is down, or a load so high that a credential ran out on the way.
    "Munge encode failed", "Munge decode failed", "Invalid authentication credential", "Failed to connect to authentication agent",
    "Authentication credential", "Expired credential", "Replayed credential", "If munged is up",
    # slurmdbd.
    "Unable to connect to database", "slurm_persist_conn_open", "Sending PersistInit msg", "Database connection reference",
    "Problem talking to the database",
    # The network, by the C library.
    "Connection refused", "Connection reset", "Connection timed out", "Broken pipe", "No route to host", "Network is unreachable",
    "Transport endpoint", "Interrupted system call", "Temporary failure in name resolution",
    # A configuration that cannot be had: a shared file system or a configless controller that is away for a moment looks like a wrong SLURM_CONF.
    "Unable to process configuration file", "Could not establish a configuration source", "Unable to establish configuration source",
)
_BUSY = (
    # What sbatch says besides `Job violates accounting/QOS policy`, which alone may also mean a job that never fits.
    "SubmitJob", "MaxSubmit",
    # MaxJobCount: slurmctld answers EAGAIN; sbatch asks again for two minutes before it gives up with these words.
    "Resource temporarily unavailable", "Slurm job queue full", "Unable to create job record, try again", "Job creation temporarily disabled",
    "System submissions disabled", "Required partition not available (inactive or drain)", "Requested reservation not usable now",
    "try again later", "try again in a bit",
)
_PREFIX = re.compile(r"^\s*(?:sbatch|squeue|sacct|scancel|scontrol|sinfo|sacctmgr|srun|slurm\w*): (?:(?:error|fatal|info): )?")
_NOISE = re.compile(r"sleeping and retrying|, retrying in \d+ ?sec|^\s*$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


class SlurmError(EvoError):
    """Of a Slurm command."""


class SlurmMissing(SlurmError, UserError):
    """There is no such program here."""


class SlurmUnavailable(SlurmError, Failure):
    """No certain answer: nobody knows whether it did what was asked."""


class SlurmRefused(SlurmError, UserError):
    """A definite no: nothing was done."""


class SlurmBusy(SlurmRefused):
    """A definite no that passes by itself: as many jobs as allowed are in the queue."""


class NoAccounting(SlurmRefused):
    """This cluster keeps no accounting that sacct could show."""


def clean(text: str) -> str:
    """Slurm's words on one line: without the programs' names, its remarks on retries, repetitions, and control characters."""
    lines = [_CONTROL.sub(" ", _PREFIX.sub("", line)).strip() for line in text.splitlines()]
    told = dict.fromkeys(line for line in lines if not _NOISE.search(line))
    words = "; ".join(told or dict.fromkeys(filter(None, lines)))
    return words if len(words) <= LONGEST_WORDS else words[:LONGEST_WORDS] + " …"


def refusal(argv: Sequence[str], code: int, err: str) -> SlurmUnavailable | SlurmRefused:
    """The error for a command that ended with `code` != 0 and these words; the caller raises it.

    An end by a signal, or without any word, is no answer either: the request may have been on its way.
    """
    words, program = clean(err), PurePath(argv[0]).name
    if program == "sacct" and "accounting storage is disabled" in err:
        return NoAccounting(f"{program}: {words}")
    if code < 0 or not words or any(each in err for each in _UNANSWERED):
        return SlurmUnavailable(f"{program}: {words or f'ended with exit code {code} and no word'}")
    if any(each in err for each in _BUSY):
        return SlurmBusy(f"{program}: {words}")
    if "Slurm temporarily unable" in err:
        return SlurmUnavailable(f"{program}: {words}")
    return SlurmRefused(f"{program}: {words}")
