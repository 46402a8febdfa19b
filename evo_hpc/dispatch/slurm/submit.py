"""sbatch, through submitit: one script handed over, its job id, and nothing left behind but the script."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from evo_hpc.dispatch.slurm.commands import Commands
from evo_hpc.dispatch.slurm.errors import SlurmUnavailable, refusal
from evo_hpc.store.atomic import write_bytes

if TYPE_CHECKING:
    from submitit import SlurmExecutor

_ANSWER = "Submitted batch job "


def submit(commands_environment: dict[str, str], script_text: str, script_path: Path, *, seconds: float) -> str:
    """Write the script and submit it; the id of the job, or of the array.

    sbatch is given `seconds`, and no other environment than `commands_environment`. Raises SlurmMissing, SlurmRefused or SlurmBusy
    when there is no job for certain, SlurmUnavailable when nobody knows: look for it by its name before submitting again.
    """
    return _executor_class()(Commands(seconds=seconds, environment=commands_environment), script_text, script_path).submit_script()


@lru_cache(maxsize=1)
def _executor_class() -> type[SlurmExecutor]:
    """submitit's Slurm executor, with its hands tied; made here since `import submitit` takes 0.2 s.

    What is kept of it is how a submission is made: the text of the script, the command, the reading of sbatch's answer. What lies
    between these, `_submit_command`, is replaced as a whole, because the original
    - runs sbatch with no time limit and with all of this process's environment, in which SBATCH_* and the memory variables of an
      enclosing job override the script,
    - prints sbatch's errors, and raises the same error whether sbatch said no or could not reach anybody,
    - names the script by a random word, and renames it after the job id afterwards, leaving a link,
    - returns a job whose state it judges by sacct alone, and whose result is a pickle.
    Its own script text is not used: it always sends --wckey, and its --signal reaches the steps, not the batch shell. Neither is
    `submit(function)`, which pickles, and waits 0.2 s between two submissions.
    """
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedSubmissionError

    class ScriptExecutor(SlurmExecutor):
        def __init__(self, commands: Commands, text: str, path: Path) -> None:
            super().__init__(folder=path.parent)
            self.commands, self.text, self.path = commands, text, path

        @classmethod
        def affinity(cls) -> int:
            return 2  # the original looks for srun on this process's PATH; whether there is an sbatch is seen when it is run

        def submit_script(self) -> str:
            return self._submit_command(command="")

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return self.text

        def _submit_command(self, command: str) -> str:  # type: ignore[override]
            write_bytes(self.path, self._make_submission_file_text(command, uid="").encode(), mode=0o777)
            command_line = self._make_submission_command(self.path.absolute())
            answer = self.commands.run(*command_line)
            if answer.code:
                raise refusal(command_line, answer.code, answer.err)
            # A site's plugins may print, too, and submitit takes the first "job 12" that it sees.
            line = next((line for line in answer.out.splitlines() if line.startswith(_ANSWER)), "")
            try:
                return self._get_job_id_from_submission_command(line)
            except FailedSubmissionError:
                raise SlurmUnavailable(f"sbatch ended well, but what it says is not known: {answer.out.strip()!r}") from None

    return ScriptExecutor
