"""Player: parallel env 0 with the policy that acts in it; every step of the episode is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import build, nearest
from embodied.core.checkpoint import load_policy
from embodied.core.config_fields import complete
from embodied.core.env import HasCurrentTask, NotSavable, Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.viewer.run_folder import Run, ViewerError
from embodied.viewer.scene.types import Array, Picture
from embodied.viewer.session.disturbances import (
    ObservationDisturbance,
    Pushes,
    describe_disturbances,
)
from embodied.viewer.session.episode import (
    MOVED,
    SAFETY,
    EnvSnapshot,
    Episode,
    Moment,
    PolicyState,
    SnapshotRecorder,
)
from embodied.viewer.session.overlays import PlanPreview, StepOverlay

WHICH = ("task", "id")
"""Settings that select one of an environment class's variants."""


class ActionSource(Protocol):
    """What `Actor` offers: actions [1, A] for observations, with or without exploration noise."""

    explore: bool

    def __call__(self, obs: Tensors, first: Tensor) -> Tensor: ...


@runtime_checkable
class HasState(Protocol):
    """An action source with a state (chunk, memory) that can be saved and restored."""

    def get_state(self) -> Tensors: ...

    def set_state(self, state: Tensors) -> None: ...


Choices = dict[str, Callable[[], ActionSource]]


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
    found: Choices = {}
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
    """The name of a checkpoint folder among the policies."""
    return f"checkpoint {checkpoint.name}"


def script_for(env: VecEnv) -> dict[str, Any] | None:
    """The configuration of the demonstrator with the name of this environment or of its task,
    ignoring wrappers; None if there is none."""
    while isinstance(inner := getattr(env, "env", None), VecEnv):
        env = inner
    target = f"{type(env).__module__}.{type(env).__name__}"
    config = getattr(env, "config", None)
    names: list[str] = []
    for name, text in _texts("env").items():
        if target not in text:
            continue  # most of them, and reading YAML takes its time
        node = complete(yaml.safe_load(text))
        told = {key: node[key] for key in WHICH if node.get(key) is not None}
        mine = all(getattr(config, key, None) == value for key, value in told.items())
        if node.get("_target_") == target and mine:
            names += [name, *map(str, told.values())]
    scripts = _texts("demonstrator")
    found = next((scripts[name] for name in names if name in scripts), None)
    return None if found is None else yaml.safe_load(found)


def _texts(group: str) -> dict[str, str]:
    folder = files("embodied.configs") / group
    found = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    return {name.removesuffix(".yaml"): (folder / name).read_text() for name in found}


BELOW, ABOVE, NONE = (0, 114, 178), (213, 94, 0), (255, 255, 255)
GROUND, INK = (255, 255, 255), (55, 65, 81)
MAP, BARS, NAMES, EDGE = 210, 120, 70, 6
"""Widths of the image's parts and the gap between them, in pixels."""
HIGH = 170


# Latent-noise RL (DSRL): the noise that a steering policy chose for its base policy, as an image.
# DSRL (Wagenmaker et al., 2025) acts by w = bound * u in place of w ~ N(0, I). Gaussian samples
# have |w| of about sqrt(D); the distance of |w| from that shows how strongly the base policy is
# steered.
class ChoosesNoise(Protocol):
    """A policy whose `inner` policy chooses the noise of a base policy, each element up to
    `bound`."""

    bound: float
    noise_shape: torch.Size
    inner: Policy


def chooses_noise(policy: object) -> TypeGuard[ChoosesNoise]:
    """Not `isinstance`, which from Python 3.12 on does not find `inner`, a submodule."""
    return all(hasattr(policy, name) for name in ChoosesNoise.__annotations__)


@torch.no_grad()
def noise_of(acts: object) -> Tensor | None:
    """The noise w [D] of the last decision; None if the noise was sampled rather than chosen, or if
    exploration hides it."""
    if not isinstance(acts, Actor) or not chooses_noise(acts.policy):
        return None
    chosen = acts.carry.get("row/action")
    if chosen is None and not acts.explore:
        inner = acts.policy.inner
        chosen = inner.act(acts.decision_obs, {}, inner.sample_noise(1))[0].flatten(1)
    return None if chosen is None else acts.policy.bound * chosen[0].detach().cpu()


def decisions(moments: Sequence[Moment]) -> list[tuple[int, Tensor]]:
    """Step index and noise [D] of each decision that has one."""
    return [
        (i, moment.noise)
        for i, moment in enumerate(moments)
        if moment.is_decision and moment.noise is not None
    ]


def describe(noise: Tensor) -> str:
    """The norm of the noise beside that of Gaussian samples, as a label."""
    size = float(noise.norm())
    return f"latent noise: norm {size:.1f} (Gaussian samples: about {math.sqrt(noise.numel()):.1f})"


def noise_picture(chosen: Sequence[Tensor], at: int, bound: float, names: Sequence[str]) -> Picture:
    """Image of noises `chosen`: decisions from left to right, elements [D] from top to bottom,
    grouped by the action element (`names`) they belong to. Number `at` is framed and repeated as
    bars. Blue is negative, orange positive."""
    from PIL import Image, ImageDraw, ImageFont

    values = np.stack([each.numpy() for each in chosen], 1) / bound
    values = values[grouped(len(values), len(names))]
    tall, count = values.shape
    row = max(2, HIGH // tall)
    image = Image.new("RGB", (NAMES + MAP + EDGE + BARS, row * tall), GROUND)
    cells = Image.fromarray(coloured(values)).resize((MAP, row * tall), Image.Resampling.NEAREST)
    image.paste(cells, (NAMES, 0))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    left = NAMES + round(at * MAP / count)
    right = max(NAMES + round((at + 1) * MAP / count), left + 2)
    pen.rectangle((left, 0, right - 1, row * tall - 1), outline=INK)
    middle = NAMES + MAP + EDGE + BARS // 2
    for i, value in enumerate(values[:, at]):
        end = middle + round(float(np.clip(value, -1, 1)) * (BARS // 2 - 2))
        low, high = sorted((middle, end))
        pen.rectangle((low, i * row, high, i * row + row - 2), fill=ABOVE if value > 0 else BELOW)
    pen.line((middle, 0, middle, row * tall), fill=INK)
    rows = tall // len(names) if names and tall % len(names) == 0 else tall
    for i, name in enumerate(names if rows < tall else ()):
        pen.text((2, i * rows * row + 1), name[:11], fill=INK, font=font)
        pen.line((0, i * rows * row, NAMES + MAP, i * rows * row), fill=INK)
    return np.asarray(image)


def grouped(size: int, elements: int) -> NDArray[np.intp]:
    """The order of D = H * A numbers, stored step by step, that groups them by action element."""
    if not elements or size % elements:
        return np.arange(size)
    return np.arange(size).reshape(-1, elements).T.reshape(-1)


def coloured(values: NDArray[np.floating]) -> Picture:
    """Numbers in [-1, 1] as colours [..., 3], white at zero."""
    strength = np.abs(np.clip(values, -1, 1))[..., None]
    ends = np.where(values[..., None] > 0, np.array(ABOVE), np.array(BELOW))
    return (strength * ends + (1 - strength) * np.array(NONE)).round().astype(np.uint8)


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
        frame = self.recorder.after_step(shown, bool(step.ended[0]), before.frame)
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
