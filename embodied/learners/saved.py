"""load_learner: the learner of a run as its checkpoint has it, for its critics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embodied.core import checkpoint
from embodied.core.build import Node, build
from embodied.core.files import MALFORMED, reading
from embodied.core.policy import Policy
from embodied.core.saved_file import fitting
from embodied.core.saved_node import require_inside
from embodied.learners.learner import Learner, RunPlan


def load_learner(saved: Path, trained: Node, policy: Policy) -> Learner:
    """The learner in the checkpoint folder `saved` of a run with the settings `trained`, around the
    checkpoint's `policy`. FileError if its state is not that learner's."""
    require_inside(trained["learner"], f"the learner of {saved}")
    part: Any = policy
    if trained.get("finetune"):
        part = part.trainable()  # the part that its learner trained
    plan = RunPlan(updates=1, execute=trained.get("execute"))
    state = checkpoint.load_state(saved, "learner")
    with fitting(state, saved.parent.parent / "run.yaml"):
        learner = build(trained["learner"], Learner, policy=part, spec=part.spec, run=plan)
    with reading(f"the learner of {saved}", *MALFORMED):
        learner.set_state(state)
    return learner
