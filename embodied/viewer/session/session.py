"""Session: episodes that are played and browsed step by step, one policy or two side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied.compose import PACKAGED, option, options
from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import build, nearest
from embodied.core.checkpoint import load_policy
from embodied.core.env import HasCurrentTask, NotSavable, Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.viewer.run_folder import Run, ViewerError
from embodied.viewer.scene.types import Array
from embodied.viewer.session.disturbances import ObservationDisturbance, Pushes
from embodied.viewer.session.episode import (
    MOVED,
    SAFETY,
    EnvSnapshot,
    Episode,
    Moment,
    PolicyState,
    SnapshotRecorder,
)
from embodied.viewer.session.overlays import PlanPreview, StepOverlay, noise_of

WHICH = ("task", "id")
"""Settings that select one of an environment class's variants."""
PLANS = 200
"""Decisions of an episode whose plans are previewed in an exported file."""
KEPT = 512 * 2**20
"""Bytes of environment states stored per episode; later steps cannot be continued from."""


class ActionSource(Protocol):
    """What `Actor` offers: actions [1, A] for observations, with or without exploration noise."""

    explore: bool

    def __call__(self, obs: Tensors, first: Tensor) -> Tensor: ...


Choices = Mapping[str, Callable[[], ActionSource]]


class ZeroAction:
    """Always the zero action (the middle of every range; the first of discrete actions)."""

    explore = False

    def __init__(self, spec: Spec) -> None:
        self.action = spec.act.zeros(1)

    def __call__(self, obs: Tensors, first: Tensor) -> Tensor:
        return self.action


def choices_for(env: VecEnv, run: Run | None) -> tuple[Choices, str]:
    """The policies for `env` by name, each loaded when first chosen, and the name of the initial
    one."""
    spec = env.spec
    found: dict[str, Callable[[], ActionSource]] = {}
    if run is not None:
        for folder in run.checkpoints:
            found[label(folder)] = lambda folder=folder: Actor(
                load_policy(folder, spec), 1, run.execute
            )
    script = script_for(env)
    if script is not None:
        found["demonstrator"] = lambda: Actor(build(script, Policy, spec=spec), 1)
    random = {"_target_": "embodied.policies.random.Random"}
    found["random"] = lambda: Actor(build(random, Policy, spec=spec), 1)
    found["zero"] = lambda: ZeroAction(spec)
    return found, next(iter(found)) if run is None else label(run.chosen)


def label(checkpoint: Path) -> str:
    return f"checkpoint {checkpoint.name}"


def script_for(env: VecEnv) -> dict[str, Any] | None:
    """The configuration of the demonstrator with the name of this environment or of its task,
    ignoring wrappers; None if there is none."""
    while isinstance(inner := getattr(env, "env", None), VecEnv):
        env = inner
    target = f"{type(env).__module__}.{type(env).__name__}"
    scripts = options("demonstrator", [PACKAGED])
    for name, file in options("env", [PACKAGED]).items():
        if target not in file.read_text():
            continue  # most of them, and reading YAML takes its time
        node = option(file)
        told = {key: node[key] for key in WHICH if node.get(key) is not None}
        config = getattr(env, "config", None)
        mine = all(getattr(config, key, None) == value for key, value in told.items())
        for each in (name, *map(str, told.values())):
            if mine and node.get("_target_") == target and each in scripts:
                return option(scripts[each])
    return None


class Session:
    """Plays one episode after another in parallel env 0 of `env`; each has a seed, and the next
    episode has the next seed. Every step is stored.

    `choices` are the policies by name; each is loaded when first chosen. `task` [D] in [0, 1] fixes
    the task vector of all episodes (None: sampled for each). `overlay` adds values and rewards to
    each step; loading it takes time, so it may come after the first image (`load_critic`).
    `plan_preview` computes the paths of plans. `at` is the index of the displayed step, `now` its
    record. `other`, if there is one, plays the same seeds beside this session.
    """

    counts = "seed"
    """What the number of an episode is called on the page."""

    def __init__(
        self,
        env: VecEnv,
        choices: Choices,
        chosen: str,
        name: str = "",
        plan_preview: PlanPreview | None = None,
    ) -> None:
        self.name, self.plan_preview = name, plan_preview
        self.run: Run | None = None
        self.other: Session | None = None
        self.overlay: StepOverlay | None = None
        self.make_overlay: Callable[[], StepOverlay | None] | None = None
        self.env, self.choices, self.explore = env, choices, False
        self.spec, self.recorder = env.spec, SnapshotRecorder(env)
        self.disturbance, self.pushes = ObservationDisturbance(), Pushes(env)
        self.pushed: dict[int, str] = {}  # by step
        self.pulled: dict[int, str] = {}
        self.held: tuple[str, Array] | None = None  # a body that is pulled, and where to [3] (m)
        self.made: dict[str, ActionSource] = {}
        self.task: Tensor | None = None
        self.choose(chosen)
        self.episode, self.at = Episode(0), 0
        # What is plotted over time: neither images nor points.
        leaves = env.spec.obs.items()
        self.curves = [name for name, leaf in leaves if len(leaf.shape) < 2 and leaf.size > 0]
        self._savable, self._room, self._rng_state = True, KEPT, torch.get_rng_state()

    @property
    def title(self) -> str:
        config = getattr(self.env, "config", None)
        return self.spec.text or getattr(config, "id", type(self.env).__name__)

    @property
    def recorded(self) -> bool:
        """Whether it plays recorded episodes, which nothing can change."""
        return self.counts == "episode"

    @property
    def trouble(self) -> str:
        """Why values or rewards are not shown; empty if they are."""
        return "" if self.overlay is None else self.overlay.trouble

    @property
    def trial(self) -> str:
        """The disturbances so far, as text; empty if there were none."""
        given = self.disturbance
        parts = [f"observations {given.late} steps late"] if given.late else []
        parts += [f"{name} is off" for name in sorted(given.off)]
        parts += [f"{name} pushed at step {step}" for step, name in sorted(self.pushed.items())]
        for name in sorted(set(self.pulled.values())):
            steps = [step for step, each in self.pulled.items() if each == name]
            parts.append(f"{name} pulled, steps {min(steps)} to {max(steps)}")
        return ", ".join(parts)

    @property
    def now(self) -> Moment:
        moments = self.episode.moments
        return moments[min(self.at, len(moments) - 1)]

    @property
    def sessions(self) -> list[Session]:
        return [self] if self.other is None else [self, self.other]

    @property
    def length(self) -> int:
        """How many steps are stored, of the longer episode (the initial state counts)."""
        return max(len(each.episode.moments) for each in self.sessions)

    @property
    def live(self) -> bool:
        return self.at >= self.length - 1

    @property
    def over(self) -> bool:
        return all(each.episode.end for each in self.sessions)

    def choose(self, name: str) -> None:
        """Let policy `name` act from the next step on; its memory starts anew."""
        if name not in self.choices:
            raise ViewerError(f'unknown policy "{name}"{nearest(name, self.choices)}')
        if name not in self.made:
            self.made[name] = self.choices[name]()
        self.acts, self.chosen = self.made[name], name
        self.first = torch.ones(1, dtype=torch.bool)

    def load_critic(self) -> None:
        """Load the overlay of each session, if that was postponed."""
        for each in self.sessions:
            make, each.make_overlay = each.make_overlay, None
            each.overlay = each.overlay if make is None else make()
            if make is not None and each.overlay is not None and len(each.episode.moments) == 1:
                start = each.episode.moments[0]
                image = each.overlay.reward_image()
                each.episode.moments[0] = replace(start, reward_image=image)

    def reset(self, seed: int) -> None:
        """Start the episode of `seed` (and of `task`, if it is fixed) in every session."""
        for each in self.sessions:
            each.task = self.task
            each._start_episode(seed)
            while each.recorded and not each.episode.end:
                each._step()  # a recording is on the time line at once
        self.seek(0)

    def advance(self) -> None:
        """Go on by one step: a stored one, else a new control step; after the end, the next
        episode."""
        if self.live and self.over:
            return self.reset(self.episode.seed + 1)
        if self.live:
            for each in self.sessions:
                if not each.episode.end:
                    each._step()
        self.seek(self.at + 1)

    def seek(self, at: int) -> None:
        """Display the stored step with index `at`, counted from the oldest."""
        at = min(max(at, 0), self.length - 1)
        for each in self.sessions:
            each.at = at

    def branch(self) -> None:
        """Discard the steps after the displayed one and continue from there, with another policy or
        other noise. ViewerError if the environment's state was not saved."""
        later = [each for each in self.sessions if self.at < len(each.episode.moments) - 1]
        if any(each.now.state is None for each in later):
            raise ViewerError(
                "this environment cannot continue from an earlier step; press Restart"
            )
        for each in later:
            each._go_back(self.at)

    def set_task(self, task: Sequence[float] | None) -> None:
        """Fix the task vector [D] (in [0, 1]) of the episodes to come; None: sampled for each
        episode. ValueError if it does not fit this environment."""
        size = 0 if self.spec.task is None else self.spec.task.size
        if task is not None and (not size or len(task) != size):
            raise ValueError(
                f"the task vector has {len(task)} elements; this environment needs {size}"
            )
        if task is not None and not all(0.0 <= value <= 1.0 for value in task):
            raise ValueError("the elements of the task vector must be in [0, 1]")
        self.task = None if task is None else torch.tensor(task, dtype=torch.float32)

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

    def _start_episode(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._rng_state = torch.get_rng_state()
        obs = row_of(self.env.reset(seed, None if self.task is None else self.task[None]))
        self._room = KEPT
        self.pushed, self.pulled, self.held = {}, {}, None
        image = None
        if self.overlay is not None:
            self.overlay.reset()
            image = self.overlay.reward_image()
        start = Moment(0, self.recorder.capture(obs), obs, obs, self._state(), reward_image=image)
        self.first = torch.ones(1, dtype=torch.bool)
        self.episode = Episode(seed, [start], self.chosen, self.recorder.shapes())

    def _go_back(self, at: int) -> None:
        """Restore the environment at stored step `at`, and the policy's state if the policy is the
        same."""
        moments = self.episode.moments[: at + 1]
        now = moments[-1]
        assert now.state is not None
        obs = self.env.set_state({key: value.clone() for key, value in now.state.items()})
        moments[-1] = replace(now, obs=row_of(obs))
        self.episode.moments = moments
        # The state of a moment has its push; what pulls acts from it on.
        self.pushed = {step: name for step, name in self.pushed.items() if step <= now.step}
        self.pulled = {step: name for step, name in self.pulled.items() if step < now.step}
        kept = now.policy_state
        self.first = torch.full((1,), kept is None or kept.name != self.chosen)
        if kept is not None and kept.name == self.chosen and isinstance(self.acts, Actor):
            self.acts.set_state(kept.actor)
            self._rng_state = kept.rng_state

    def _step(self) -> None:
        before = self.episode.moments[-1]
        self.acts.explore = self.explore
        # The RNG state is this session's own, so a second session beside it changes nothing.
        torch.set_rng_state(self._rng_state)
        action = self.acts(self.disturbance.of(self.episode.moments), self.first)
        self._rng_state = torch.get_rng_state()
        if self.held is not None:
            self.pushes.pull(*self.held, self.spec.dt)
            self.pulled[before.step] = self.held[0]
        step = self.env.step(action)
        self.first = step.ended
        shown = row_of(step.next_obs)
        frame = self.recorder.after_step(shown, bool(step.ended[0]), before.frame)
        moment = self._moment(before, action, step, shown, frame)
        if self.overlay is not None:
            moment = replace(moment, reward_image=self.overlay.reward_image())
            known = self.overlay.numbers(before, moment, self.acts)
            moment = replace(moment, numbers={**moment.numbers, **known})
        self.at -= self.episode.add(moment)

    def _moment(
        self, before: Moment, action: Tensor, step: Step, shown: Tensors, frame: EnvSnapshot
    ) -> Moment:
        """The record of one step. At the end of an episode it shows the final state, not the next
        initial state that the environment is already in."""
        ended = bool(step.ended[0])
        end = ("ended" if bool(step.terminated[0]) else "out of time") if ended else ""
        actor = self.acts if isinstance(self.acts, Actor) else None
        is_decision = bool(self.first[0] if actor is None else actor.decided[0])
        return Moment(
            step=before.step + 1,
            frame=frame,
            next_obs=shown,
            obs=row_of(step.obs) if ended else shown,
            state=None if ended else self._state(),
            action=action[0].float().reshape(-1).tolist(),
            reward=float(step.reward[0]),
            success=bool(step.log["success"][0]) if "success" in step.log else None,
            plan=None if actor is None else actor.plan[0].detach().clone(),
            is_decision=is_decision,
            end=end,
            policy_state=None
            if actor is None
            else PolicyState(self.chosen, actor.get_state(), self._rng_state),
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

    @property
    def decision_index(self) -> int | None:
        """Index of the step that the running action chunk started with (or the last one before it);
        None if there was none."""
        moments, at = self.episode.moments, min(self.at, len(self.episode.moments) - 1)
        for number in range(min(at + 1, len(moments) - 1), 0, -1):
            if moments[number].is_decision:
                return number
        return None

    def trail(self) -> Array | None:
        """The tool's past path; None if it is not observed."""
        return None if self.plan_preview is None else self.plan_preview.trail(self.episode.moments)

    def plans(self) -> list[tuple[int, list[Array]]]:
        """The plan paths of every decision, with its step index."""
        fresh = [i for i, moment in enumerate(self.episode.moments) if i and moment.is_decision]
        every = [(i - 1, self.plan_paths(i)) for i in fresh[:PLANS]]
        return [(at, paths) for at, paths in every if paths]

    def plan_paths(self, number: int | None = None) -> list[Array]:
        """Paths [H + 1, 3] (m) of the tool for the decision with step index `number` (None: the
        displayed one): of the chunk that is executed first, then for other noise samples."""
        number = self.decision_index if number is None else number
        if number is None or self.plan_preview is None:
            return []
        before, after = self.episode.moments[number - 1 : number + 1]
        if after.policy_state is None:
            return []
        return self.plan_preview.paths(before, after, self.made[after.policy_state.name])

    def close(self) -> None:
        for each in self.sessions:
            each.env.close()
            if each.plan_preview is not None:
                each.plan_preview.close()


def row_of(obs: Tensors) -> Tensors:
    """Parallel env 0 [1, ...] as a copy: environments may reuse their buffers."""
    return tt.each(obs, lambda value: value[:1].clone())
