"""The intent to run an attempt: on disk, with its spec, before anything starts."""

from __future__ import annotations

import time

from evo_hpc.dispatch.attempt import campaign_root
from evo_hpc.errors import UserError
from evo_hpc.jobs.spec import ExecutorName, Intent, JobSpec, spec_bytes
from evo_hpc.paths import JobPaths
from evo_hpc.store.atomic import write_bytes, write_json_once
from evo_hpc.store.lease import Lease
from evo_hpc.store.manifest import sha256


def declare(job: JobPaths, spec: JobSpec, work: str, lease: Lease, executor: ExecutorName) -> None:
    """Commit the intent. Nothing runs before it is on disk; a second call changes nothing."""
    lease.check()
    if not job.intent.exists():
        write_bytes(job.spec, spec_bytes(spec))
        intent = Intent(
            name=spec.name, spec_sha256=sha256(job.spec), owner=spec.owner, work=work, root=campaign_root(job),
            generation=lease.generation, written_at=time.time(), executor=executor,
        )
        write_json_once(job.intent, intent.model_dump())


def check_spec(job: JobPaths, intent: Intent) -> None:
    """Raise UserError when the spec is no longer the one that the intent is for."""
    if sha256(job.spec) != intent.spec_sha256:
        raise UserError(f"{job.spec}: changed after the job was submitted; restore it, or remove {job.root} to plan it anew")
