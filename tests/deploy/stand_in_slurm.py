"""What deploy/slurm asks of Slurm, on this machine alone: srun, scontrol, squeue and scancel, by their names.

In: the words of the job script. Out: a step is so many processes and a file with their ids in $STEPS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

STEPS = Path(os.environ["STEPS"])
KNOWN = {
    *("--nodes", "--ntasks", "--nodelist", "--job-name", "--output", "--open-mode", "--overlap", "--kill-on-bad-exit"),
    *("--exact", "--gres", "--gpus", "--gpus-per-task", "--cpus-per-task"),
}


def srun(words: list[str]) -> int:
    """Options, then a command; returns when all of its tasks have ended."""
    number = next(index for index, word in enumerate(words) if not word.startswith("--"))
    options = dict(word.partition("=")[::2] for word in words[:number])
    assert set(options) <= KNOWN, options
    tasks = []
    for task in range(int(options["--ntasks"])):
        with open(options["--output"].replace("%N", options["--nodelist"]).replace("%t", str(task)), "ab") as log:
            tasks.append(subprocess.Popen(words[number:], stdout=log, stderr=log))
    step = STEPS / f"{options['--job-name']}.{os.getpid()}"
    step.write_text(" ".join(str(task.pid) for task in tasks))
    codes = [task.wait() for task in tasks]
    step.unlink()
    return max(codes)


def scontrol(words: list[str]) -> int:
    """Names of nodes, one a line."""
    assert words[:2] == ["show", "hostnames"]
    sys.stdout.write("".join(f"{name}\n" for name in words[2].split(",")))
    return 0


def squeue(words: list[str]) -> int:
    """Steps that go on."""
    assert words == ["--steps", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%i %j"]
    for step in STEPS.iterdir():
        sys.stdout.write(f"{step.name} {step.stem}\n")
    return 0


def scancel(words: list[str]) -> int:
    """A signal to the tasks of steps."""
    assert words[0] == "--signal=TERM"
    for pid in [pid for step in words[1:] for pid in (STEPS / step).read_text().split()]:
        os.kill(int(pid), signal.SIGTERM)
    return 0


if __name__ == "__main__":
    program = {"srun": srun, "scontrol": scontrol, "squeue": squeue, "scancel": scancel}[Path(sys.argv[0]).name]
    sys.exit(program(sys.argv[1:]))
