"""Write `learners.json`, `envs.json` and `states.json` anew, or only those named:

    python -m tests.golden.record [learners] [envs] [states]

They are what later code is held to, so they may be written anew only in a commit that says so and
why: because numbers were meant to change (a corrected learner, another MuJoCo), never because a
test that compares with them fails.
"""

from __future__ import annotations

import sys

import embodied.envs  # noqa: F401  (chooses the off-screen renderer before anything imports mujoco)
from tests.golden import fingerprint, test_envs, test_learners, test_states

MODULES = {"learners": test_learners, "envs": test_envs, "states": test_states}


def main(names: list[str]) -> None:
    for name in names or list(MODULES):
        records = MODULES[name].record_all()
        fingerprint.write(MODULES[name].FILE, records)
        print(f"{MODULES[name].FILE}: {len(records)} records")


if __name__ == "__main__":
    main(sys.argv[1:])
