"""SecondAgent: the second agent of a two-agent teacher (PAIRED's antagonist), trained in the run.

It has a policy, a learner and a collector of its own, of the same kinds as the first agent's. The
training loop steps it; its environment steps count as steps of the run, and its state is part of
the loop's checkpoint. The first agent's policy is the one that is evaluated and deployed.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.env import Step
from embodied.core.tensors import Tensors
from embodied.learners.learner import Learner
from embodied.teachers.teacher import TwoAgentTeacher
from embodied.training.collector import Collector


class SteppedLoop(Protocol):
    """A training loop that is stepped from outside."""

    collector: Collector

    def advance(self) -> tuple[dict[str, Tensor], Step]: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


class SecondAgent:
    """An agent that `loop` steps and updates with `learner`, when `teacher` decides."""

    def __init__(self, teacher: TwoAgentTeacher, learner: Learner, loop: SteppedLoop) -> None:
        self.teacher, self.learner, self.loop = teacher, learner, loop
        self.new_steps = 0
        self.metrics: dict[str, Tensor] = {}

    def after_step(self, step: Step) -> Step:
        """After `step` of the first agent, step the second one as often as the teacher decides.

        Returns the step from which the first agent learns.
        """
        return self.teacher.after_step(step, self.step)

    def step(self, obs: Tensors | None = None) -> None:
        """One step of all parallel envs, and an update where one is due.

        `obs`: the current observations, if the first agent changed the environment since the last
        step (None: those of the last step).
        """
        if obs is not None:
            self.loop.collector.obs = obs
        metrics, step = self.loop.advance()
        self.new_steps += len(step.reward)
        if metrics:
            self.metrics = {f"rival_{key}": value for key, value in metrics.items()}

    def drain(self) -> int:
        """The number of environment steps since the last call."""
        steps, self.new_steps = self.new_steps, 0
        return steps

    def get_state(self) -> dict[str, Any]:
        return {"learner": self.learner.get_state(), "loop": self.loop.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly from `get_state`."""
        device = self.loop.collector.actor.device
        self.learner.set_state(tt.state_to(state["learner"], device))
        self.loop.set_state(state["loop"])
        if state["loop"]["collector"] is None:
            self.loop.collector.restart()
