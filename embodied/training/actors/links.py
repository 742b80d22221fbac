"""Links: what the learner's process and an actor's share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from embodied.training.actors.byte_ring import ByteRing

if TYPE_CHECKING:
    from multiprocessing.synchronize import Semaphore

LOOK = 0.1  # s between two looks at whether the other process lives


@dataclass
class Links:
    """What both processes share. `rng` [n] (uint8): the state of torch's generator in lockstep."""

    ring: ByteRing
    credits: Semaphore
    items: Semaphore
    rng: Tensor
