"""Takes the place of the jobs' interpreter: runs the real launcher, with stand-ins for the roles."""

from __future__ import annotations

import os
import sys

import evo_hpc.dispatch.launcher as launcher
import evo_hpc.dispatch.roles as roles
from evo_hpc.dispatch.roles import Role

if __name__ == "__main__":
    if sys.argv[1:3] != ["-m", "evo_hpc.dispatch.launcher"]:  # what the doctor asks of an interpreter
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    broken = os.environ.get("FAKE_FAILURE_IN")
    fakes = {
        kind: tuple(
            Role(
                r.name, "fake_roles:broken" if r.name == broken else f"fake_roles:{'rollout' if r.name == 'rollout' else kind}", r.primary,
                worker=r.worker and "FAKE_WORKERS" in os.environ,
            )
            for r in kind_roles
        )
        for kind, kind_roles in roles.ROLES.items() if kind != "analyse"  # the real one is quick
    }
    launcher.ROLES.update(fakes)
    sys.exit(launcher.main(sys.argv[3:]))
