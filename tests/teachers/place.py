"""A task space of two elements, and teachers in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from embodied.core.build import build
from embodied.core.spec import Leaf, Spec
from embodied.teachers.teacher import Curriculum, Outcome

TASK = Leaf((2,), low=0.0, high=1.0, names=("x", "y"))
SPEC = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), 0.1, TASK)
LINE = Spec(SPEC.obs, SPEC.act, 0.1, Leaf((1,), low=0.0, high=1.0, names=("x",)))


def made(target: str, seed: int = 0, spec: Spec = SPEC, **settings: Any) -> Any:
    """A teacher of `embodied.teachers.TARGET` that scores returns as they are."""
    node = {"_target_": f"embodied.teachers.{target}", "signal": "return", **settings}
    return build(node, Curriculum, spec=spec, seed=seed)


def ended(*scores: float) -> Outcome:
    value = torch.tensor(scores)
    return Outcome(value, value, torch.ones(len(scores)))


def point(*values: float) -> np.ndarray:
    return np.array(values)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))
