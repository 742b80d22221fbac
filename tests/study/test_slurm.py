"""`embodied sweep on=slurm` with our own `sbatch` and `scancel` first on PATH: they take the
options of Slurm's that are used, and run the job's script on this machine."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from embodied.study.sweep import launcher
from tests.builders import exit_of, wait_until
from tests.study.test_sweep import WORDS, Interrupted, pruned, trials_of
from tests.tiers import only_all

SBATCH = """#!{python}
import re, subprocess, sys
from pathlib import Path
words, script = sys.argv[1:-1], Path(sys.argv[-1])
assert "--wait" in words, words
given = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script.read_text(), re.M))
assert given == {{"open-mode": "append", "signal": "B:INT@120"}}, given
given = dict(word[2:].split("=", 1) for word in words if "=" in word)
output = re.sub("%(.)", lambda found: "%" if found[1] == "%" else "7", given.pop("output"))
with open(output, "a") as log, open("{jobs}/submitted", "a") as submitted:
    job = subprocess.Popen(["bash", script], stdout=log, stderr=log)
    Path("{jobs}", given.pop("job-name")).write_text(str(job.pid))
    submitted.write(" ".join(f"--{{key}}={{value}}" for key, value in given.items()) + "\\n")
print("Submitted batch job", job.pid)
sys.exit(job.wait())
"""
SCANCEL = """#!{python}
import os, signal, sys
from pathlib import Path
if "--state=PENDING" in sys.argv:
    sys.exit()  # all jobs run
given = dict(word.split("=") for word in sys.argv[2:])
assert sys.argv[1] == "--batch" and given["--signal"] == "INT", sys.argv
os.kill(int(Path("{jobs}", given["--name"]).read_text()), signal.SIGINT)
"""


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the process number of each job, by its name."""
    pytest.importorskip("optuna")
    folder, programs = tmp_path / "jobs", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for name, text in {"sbatch": SBATCH, "scancel": SCANCEL}.items():
        file = programs / name
        file.write_text(text.format(python=sys.executable, jobs=folder))
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return folder


def test_each_trial_is_a_job(tmp_path: Path, jobs: Path) -> None:
    out = tmp_path / "sweep"
    words = [*WORDS, "learner.gamma=0.9..0.99", "trials=2", "workers=2", f"out={out}"]
    assert exit_of("sweep", *words, "on=slurm", "slurm=--time=10 --mem=1G") == 0
    assert (jobs / "submitted").read_text() == "--time=10 --mem=1G\n" * 2
    assert len(list(jobs.iterdir())) == 3, "each has a name of its own"
    assert len(trials_of(out)) == 2
    assert "Submitted batch job" in (out / "trial-000.slurm").read_text()
    assert "two_gap-gaussian-sac" in (out / "trial-000.log").read_text()


@only_all  # as here: test_sweep.py
def test_a_poor_trial_is_ended_by_scancel_after_it_saved(tmp_path: Path) -> None:
    pruned(tmp_path / "sweep", launcher("slurm", None))


def test_an_interrupted_sweep_ends_its_jobs(tmp_path: Path, jobs: Path) -> None:
    words = ["sweep", *WORDS, "learner.gamma=0.9..0.99", "trials=1", "steps=5000", "rungs=10"]
    Interrupted(tmp_path, "out/trial-000", *words, "out=out", "on=slurm")
    (job,) = [file for file in jobs.iterdir() if file.name != "submitted"]
    assert not Path(f"/proc/{job.read_text()}").exists(), "the job ended too"


def test_the_folder_of_a_job_may_have_any_name(tmp_path: Path, jobs: Path) -> None:
    """A space, a comma, a line that Slurm would obey, and what it would fill in."""
    folder = tmp_path / "a, b\n#SBATCH --wrap=reboot 100%j"
    slurm = launcher("slurm", None)
    assert slurm.start(["python", "-c", "print('ran')"], folder).wait(600) == 0
    assert Path(f"{folder}.log").read_text() == "ran\n"
    waits = slurm.start(["python", "-c", "import time; time.sleep(600)"], folder)
    wait_until(lambda: len((jobs / "submitted").read_text().splitlines()) == 2, "the second job")
    slurm.interrupt(waits, folder)
    assert waits.wait(600) != 0
    (job,) = [file for file in jobs.iterdir() if file.name != "submitted"]
    assert "," not in job.name and " " not in job.name and "\n" not in job.name
