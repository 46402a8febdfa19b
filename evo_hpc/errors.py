"""The two kinds of failure that a command can end with; every subject's own error is one of them."""

from __future__ import annotations


class EvoError(Exception):
    """Anything this package raises on purpose; the message says what, where, and what to do."""

    exit_code = 1


class UserError(EvoError):
    """The user can mend it: a config, an edited folder, a missing install. Exit code 2."""

    exit_code = 2


class Failure(EvoError):
    """The machine or the code failed: a job died, a disk is full. Exit code 1."""

    exit_code = 1
