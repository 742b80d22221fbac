"""How the data below `data/` were made, at commit 8490570, and figures of what becomes of them.

    python -m tests.golden.make_old_runs [figures]

Kept as documentation, not run by tests. The runs are those of the code of then and must not be made
again: that is their purpose. `figures` writes only `expected.json`, which like the other records
may be written anew only in a commit that says so and why.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.golden import fingerprint, runs

SMALL = (
    "size=debug device=cpu video=false save_every=0 eval_every=0 eval.episodes=4 eval.num_envs=2"
)
NETS = "policy.hidden=[16,16] learner.hidden=[16,16]"
COMMANDS = (
    f"train experiment=pendulum_sac {SMALL} {NETS} steps=600 start=100 replay_size=600 "
    "output=old_run_sac",
    f"train experiment=fr3_reach_far {SMALL} teacher=alpgmm teacher.every=8 "
    "teacher.returns=[-50,0] policy.hidden=[16,16] learner.value.hidden=[16,16] "
    "env.num_envs=4 env.horizon=20 steps=800 "
    "output=old_run_ppo_teacher",
    "demos collect env=two_gap episodes=6 num_envs=3 out=old_dataset",
    f"train experiment=two_gap_flow {SMALL} steps=200 learner.batch_size=64 policy.width=32 "
    "policy.depth=1 demos=old_dataset output=old_clone",
    f"train experiment=two_gap_dsrl {SMALL} {NETS} steps=400 replay_size=300 init=old_clone "
    "output=old_dsrl",
    f"train experiment=fr3_lift_residual env=two_gap env.horizon=50 {SMALL} {NETS} steps=300 "
    "replay_size=300 init=old_clone output=old_residual",
)
MADE_AGAIN = ("report.html", "tasks.png")  # from the rest, by every command


def make() -> None:
    """Play all commands in an empty folder and keep what they write."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path.cwd()
        os.chdir(folder)
        for line in COMMANDS:
            runs.embodied(line)
        os.chdir(here)
        for made in sorted(Path(folder).iterdir()):
            for name in MADE_AGAIN:
                (made / name).unlink(missing_ok=True)
            shutil.rmtree(runs.DATA / made.name, ignore_errors=True)
            shutil.copytree(made, runs.DATA / made.name)


def figures() -> None:
    """Play every case, each with fresh copies."""
    records: dict[str, runs.Figures] = {}
    for name, play in runs.CASES.items():
        with tempfile.TemporaryDirectory() as folder, runs.inside(Path(folder)):
            records[name] = play()
    fingerprint.write(runs.FILE, records)


if __name__ == "__main__":
    if "figures" not in sys.argv[1:]:
        make()
    figures()
