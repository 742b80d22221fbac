"""Player: parallel env 0 with the policy that acts in it; every step of the episode is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import nearest
from embodied.core.env import HasCurrentTask, NotSavable, Step, VecEnv
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.viewer.run_folder import Run, ViewerError
from embodied.viewer.scene.types import Array
from embodied.viewer.session.disturbances import (
    ObservationDisturbance,
    Pushes,
    describe_disturbances,
)
from embodied.viewer.session.episode import MOVED, SAFETY, Episode, Moment, PolicyState
from embodied.viewer.session.noise import noise_of
from embodied.viewer.session.plan_preview import PlanPreview
from embodied.viewer.session.policies import ActionSource, HasState
from embodied.viewer.session.snapshot import EnvSnapshot, SnapshotRecorder

if TYPE_CHECKING:
    from embodied.viewer.session.overlays import StepOverlay

PLANS = 200
"""Decisions of an episode whose plans are previewed in an exported file."""
KEPT = 512 * 2**20
"""Bytes of environment states stored per episode; later steps cannot be continued from."""


class Player:
    """Parallel env 0 of `env` and the policy that acts in it; episodes are stored from the start.

    `choices` are the policies by name; each is loaded when first chosen. `task` [D] in [0, 1] fixes
    the task vector of all episodes (None: sampled for each). `overlay` adds values and rewards to
    each step; loading it takes time, so it may come after the first image (`load_critic`).
    `plan_preview` computes the paths of plans. `at` is the index of the displayed step.
    """

    counts = "seed"
    """What the number of an episode is called on the page."""

    def __init__(
        self,
        env: VecEnv,
        choices: Mapping[str, Callable[[], ActionSource]],
        chosen: str,
        name: str = "",
        plan_preview: PlanPreview | None = None,
    ) -> None:
        self.name, self.plan_preview = name, plan_preview
        self.run: Run | None = None
        self.overlay: StepOverlay | None = None
        self.make_overlay: Callable[[], StepOverlay | None] | None = None
        self.env, self.choices, self.explore = env, choices, False
        self.spec, self.recorder = env.spec, SnapshotRecorder(env)
        self.disturbance, self.pushes, self.pushed = (
            ObservationDisturbance(),
            Pushes(env),
            dict[int, str](),
        )
        self.held: tuple[str, Array] | None = None
        """A body that is pulled, and where to [3] (m)."""
        self.pulled = dict[int, str]()
        self.made: dict[str, ActionSource] = {}
        self.task: Tensor | None = None
        self.choose(chosen)
        self.episode, self.at = Episode(0), 0
        # What is plotted over time: neither images nor points.
        leaves = env.spec.obs.items()
        self.curves = [name for name, leaf in leaves if len(leaf.shape) < 2 and leaf.size > 0]
        self.first = torch.ones(1, dtype=torch.bool)
        self._savable, self._room, self._rng_state = True, KEPT, torch.get_rng_state()

    @property
    def title(self) -> str:
        """The title of the page."""
        config = getattr(self.env, "config", None)
        return self.spec.text or getattr(config, "id", type(self.env).__name__)

    @property
    def trouble(self) -> str:
        """Why values or rewards are not shown; empty if they are."""
        return "" if self.overlay is None else self.overlay.trouble

    @property
    def trial(self) -> str:
        """The disturbances so far, as text."""
        return describe_disturbances(self.disturbance, self.pushed, self.pulled)

    def choose(self, name: str) -> None:
        """Let policy `name` act from the next step on; its memory starts anew."""
        if name not in self.choices:
            raise ViewerError(f'unknown policy "{name}"{nearest(name, self.choices)}')
        if name not in self.made:
            self.made[name] = self.choices[name]()
        self.acts, self.chosen = self.made[name], name
        self.first = torch.ones(1, dtype=torch.bool)

    def start_episode(self, seed: int) -> None:
        """Reset the environment with `seed` and start a new episode."""
        torch.manual_seed(seed)
        self._rng_state = torch.get_rng_state()
        task = None if self.task is None else self.task[None]
        obs = row_of(self.env.reset(seed, task))
        self._room = KEPT
        self.pushed, self.pulled, self.held = {}, {}, None
        image = None
        if self.overlay is not None:
            self.overlay.reset()
            image = self.overlay.reward_image()
        start = Moment(0, self.recorder.capture(obs), obs, obs, self._state(), reward_image=image)
        self.first = torch.ones(1, dtype=torch.bool)
        self.episode = Episode(seed, [start], self.chosen, self.recorder.shapes())

    def load_critic(self) -> None:
        """Load the overlay, if that was postponed."""
        make, self.make_overlay = self.make_overlay, None
        if make is None:
            return
        self.overlay = make()
        if self.overlay is not None and len(self.episode.moments) == 1:
            start = self.episode.moments[0]
            self.episode.moments[0] = replace(start, reward_image=self.overlay.reward_image())

    def go_back(self, at: int) -> None:
        """Restore the environment at stored step `at`, and the policy's state if the policy is the
        same."""
        moments = self.episode.moments[: at + 1]
        now = moments[-1]
        assert now.state is not None
        obs = self.env.set_state({key: value.clone() for key, value in now.state.items()})
        moments[-1] = replace(now, obs=row_of(obs))
        self.episode.moments = moments
        last = moments[-1].step
        self.pushed = {step: name for step, name in self.pushed.items() if step < last}
        self.pulled = {step: name for step, name in self.pulled.items() if step < last}
        same = now.policy_state is not None and now.policy_state.name == self.chosen
        self.first = torch.full((1,), not same)
        if same and now.policy_state is not None and isinstance(self.acts, HasState):
            self.acts.set_state(now.policy_state.actor)
            self._rng_state = now.policy_state.rng_state

    def step(self) -> None:
        """Simulate one control step and store it."""
        before = self.episode.moments[-1]
        self.acts.explore = self.explore
        # The RNG state is this session's own, so a second session beside it changes nothing.
        torch.set_rng_state(self._rng_state)
        seen = before.obs if self.disturbance.whole else self.disturbance.of(self.episode.moments)
        action = self.acts(seen, self.first)
        self._rng_state = torch.get_rng_state()
        if self.held is not None:
            self.pushes.pull(*self.held, self.spec.dt)
            self.pulled[before.step] = self.held[0]
        step = self.env.step(action)
        self.first = step.ended
        shown = row_of(step.next_obs)
        ended = bool(step.ended[0])
        frame = self.recorder.after_step(shown, ended, before.frame)
        moment = self._moment(before, action, step, shown, frame)
        if self.overlay is not None:
            moment = replace(moment, reward_image=self.overlay.reward_image())
            known = self.overlay.numbers(before, moment, self.acts)
            moment = replace(moment, numbers={**moment.numbers, **known})
        forgotten = self.episode.add(moment)
        self.at -= forgotten

    def push(self, name: str, strength: float, way: Array | None = None) -> None:
        """Push `name` at the newest step.

        With a `way` [3], `name` is a link of the robot, pushed along it. ViewerError if it cannot
        be pushed.
        """
        pushes = self.pushes
        if name not in (pushes.names if way is None else pushes.links()):
            known = ", ".join(pushes.names)
            raise ViewerError(f"{name} cannot be pushed here (can: {known or 'nothing'})")
        now = self.episode.moments[-1]
        if now.end:
            raise ViewerError("the episode has ended; press Restart first")
        if way is None:
            pushes.push(name, strength, now.step)
        else:
            pushes.shove(name, way, strength)
        self.pushed[now.step] = name
        self.episode.moments[-1] = replace(now, state=self._state())

    def _moment(
        self, before: Moment, action: Tensor, step: Step, shown: Tensors, frame: EnvSnapshot
    ) -> Moment:
        """The record of one step. At the end of an episode it shows the final state, not the next
        initial state that the environment is already in."""
        ended = bool(step.ended[0])
        end = ("ended" if bool(step.terminated[0]) else "out of time") if ended else ""
        plan: Tensor | None = getattr(self.acts, "plan", None)
        decided: Tensor = getattr(self.acts, "decided", self.first)
        is_decision = bool(decided[0])
        return Moment(
            step=before.step + 1,
            frame=frame,
            next_obs=shown,
            obs=row_of(step.obs) if ended else shown,
            state=None if ended else self._state(),
            action=action[0].float().reshape(-1).tolist(),
            reward=float(step.reward[0]),
            success=bool(step.log["success"][0]) if "success" in step.log else None,
            plan=None if plan is None else plan[0].detach().clone(),
            chunk_index=int(getattr(self.acts, "cursor", torch.ones(1))[0]) - 1,
            is_decision=is_decision,
            end=end,
            policy_state=PolicyState(self.chosen, self.acts.get_state(), self._rng_state)
            if isinstance(self.acts, HasState)
            else None,
            numbers={
                name: float(value[0])
                for name, value in step.log.items()
                if name.startswith((SAFETY, MOVED))
            },
            noise=noise_of(self.acts) if is_decision else before.noise,
        )

    def _state(self) -> Tensors | None:
        if not self._savable or self._room <= 0:
            return None
        try:
            state = {key: value.clone() for key, value in self.env.get_state().items()}
        except NotSavable:
            self._savable = False
            return None
        self._room -= sum(value.numel() * value.element_size() for value in state.values())
        return state

    @property
    def current_task(self) -> list[float] | None:
        """The task vector of the running episode, if the environment shows it."""
        source = find_protocol(self.env, HasCurrentTask)
        task = None if source is None else source.task
        if self.env.spec.task is None or task is None or len(task) != 1:
            return None if self.task is None else self.task.tolist()
        return [float(value) for value in task[0]]

    def plans(self) -> list[tuple[int, list[Array]]]:
        """The plan paths of every decision, with its step index."""
        fresh = [i for i, moment in enumerate(self.episode.moments) if i and moment.is_decision]
        every = [(i - 1, self.plan_paths_at(i)) for i in fresh[:PLANS]]
        return [(at, paths) for at, paths in every if paths]

    def trail(self) -> Array | None:
        """The tool's past path; None if it is not observed."""
        return None if self.plan_preview is None else self.plan_preview.trail(self.episode.moments)

    def plan_paths_at(self, number: int) -> list[Array]:
        """Plan paths of the decision with step index `number`."""
        before, after = self.episode.moments[number - 1 : number + 1]
        if self.plan_preview is None or after.policy_state is None:
            return []
        return self.plan_preview.paths(before, after, self.made[after.policy_state.name])


def row_of(obs: Tensors) -> Tensors:
    """Parallel env 0 [1, ...] as a copy: environments may reuse their buffers."""
    return tt.each(obs, lambda value: value[:1].clone())
