"""Values and rewards over the displayed episode: the run's critic and the terms of its reward.

Both come from the run's newest checkpoint and are evaluated for whichever policy acts.
A run's model can also imagine how the episode goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, Node, kind_of
from embodied.core.checkpoint import CheckpointError
from embodied.core.device import device_of, forked
from embodied.core.env import NotSavable, VecEnv
from embodied.core.errors import ContractWarning
from embodied.core.files import MALFORMED
from embodied.core.policy import Policy
from embodied.core.reward import AddedObservation, AugmentsEnv, HasComponents, Reward
from embodied.core.saved_node import read_run_settings
from embodied.core.spec import Leaf, Spec, hidden
from embodied.core.tensors import Tensors
from embodied.core.wrapper import Wrapper
from embodied.learners.learner import load_learner
from embodied.models.dynamics import LATENT, Dynamics, LatentDynamics, load
from embodied.reports.datasets import make_reward, of_run
from embodied.viewer.scene.types import Array, Picture, picture_of
from embodied.viewer.session.episode import IMAGINED, TERM, CompressedImage, Moment

SHOWN = 4  # elements that are plotted, imagined and real


class Imagination:
    """The most typical outcome of the executed actions in `model`, from the first observation of
    the episode on, without another look at it."""

    def __init__(self, model: Dynamics) -> None:
        self.model = model
        self.states: dict[int, Tensors] = {}  # by step, as the model sees it

    def reset(self) -> None:
        self.states = {}

    @torch.no_grad()
    def numbers(self, before: Moment, after: Moment) -> dict[str, float]:
        """The first elements of the vectors that were imagined and observed after the step from
        `before` to `after`; of pictures the error (root mean square, 0 to 255)."""
        assert after.action is not None
        model, act = self.model, self.model.data_spec.act
        state = self.states.get(before.step)
        state = self._seen(before.obs) if state is None else state
        action = torch.tensor([after.action]).view(1, *act.shape)
        action = action.clamp(-1, 1) if act.is_continuous else action.to(getattr(torch, act.dtype))
        state = model.step(state, action, torch.zeros(1, model.noise_size)).next_obs
        self.states[after.step] = state
        found = model.decoded(state[LATENT]) if isinstance(model, LatentDynamics) else state
        numbers: dict[str, float] = {}
        for name, value in found.items():
            leaf, real = model.data_spec.obs[name], after.next_obs[name]
            if leaf.is_picture:
                off = (value.float() - real.float()).square().mean().sqrt()
                numbers[f"{IMAGINED}{name}, error"] = float(off)
                continue
            named = (
                leaf.names
                if len(leaf.names) == leaf.size
                else [f"{name} {i}" for i in range(leaf.size)]
            )
            pairs = zip(named, value.flatten().tolist(), real.flatten().tolist(), strict=True)
            for label, imagined, seen in [*pairs][: SHOWN - len(numbers) // 2]:
                numbers[f"{IMAGINED}{label}, imagined"] = imagined
                numbers[f"{IMAGINED}{label}, real"] = seen
        return numbers

    def _seen(self, obs: Tensors) -> Tensors:
        """The model's state at observations [1, ...]."""
        model, obs = self.model, tt.to(obs, "cpu")
        if not isinstance(model, LatentDynamics):
            return {name: obs[name] for name in model.spec.obs}
        empty = torch.zeros(1, model.spec.obs[LATENT].size)
        return {LATENT: model.filtered(empty, torch.zeros(1, model.choices.width), obs)}


def imagination_of(env: Node | None, spec: Spec) -> Imagination | None:
    """That of a run whose training environment has the node `env`; None where it is no model's, or
    where its model is not of the displayed environment, with `spec`."""
    try:
        if not env or not hasattr(kind_of(env, VecEnv), "deployed"):
            return None
        model = load(Path(str(env["model"])))
    except (ConfigError, KeyError):
        return None
    known = {name: spec.obs.get(name) for name in model.data_spec.obs}
    same = known == {**model.data_spec.obs} and spec.act == model.data_spec.act
    return Imagination(model.requires_grad_(False)) if same else None


SCORE = "image score"
"""Name of the plotted score of the image."""


# The image that the run's reward is computed from, rendered at every step as in training.
# Rewards on images (`AugmentsEnv`) add an observation to the environment they are trained in. The
# viewer builds the same wrapper around the displayed environment and stores its image per step.
@runtime_checkable
class ScoresImages(Protocol):
    """A reward that scores single images, separately from the reward it computes from them."""

    def score(self, pictures: Tensor) -> Tensor:
        """Scores [N] of uint8 images [N, H, W, 3]."""
        ...


class UnsupportedReward(RuntimeError):
    """The reward needs more observations than one rendered image."""


@dataclass(frozen=True)
class RewardCamera:
    """Captures the image of parallel env 0 that wrapper `layer` (None: it needs none) adds for the
    reward. `hides_terminations`: it was trained with terminations treated as truncations."""

    layer: AddedObservation | None = None
    hides_terminations: bool = False

    def capture(self) -> CompressedImage | None:
        """The image after the last step; the final one of an episode that has just ended."""
        if self.layer is None:
            return None
        return CompressedImage.of(self.layer.added_observation(0).cpu().numpy())

    def observation(self, image: CompressedImage | None) -> Tensors:
        """`image` as the observation [1, H, W, 3] that the reward reads."""
        if self.layer is None or image is None:
            return {}
        return {added_name(self.layer): torch.from_numpy(image.picture().copy())[None]}


def reward_camera(reward: Reward, env: VecEnv) -> RewardCamera:
    """The camera for `reward` on `env`; UnsupportedReward if the reward needs anything else than
    one image or none."""
    layers: list[Wrapper] = []
    outer = reward.augment_env(env) if isinstance(reward, AugmentsEnv) else env
    while outer is not env and isinstance(outer, Wrapper):
        layers.append(outer)
        outer = outer.env
    # Wrappers forward attributes to the inner environment, so the class is asked.
    adding = [layer for layer in layers if issubclass(type(layer), AddedObservation)]
    known = all(layer in adding or layer.hides_terminations for layer in layers)
    if not known or len(adding) > 1 or not all(is_image(layer) for layer in adding):
        raise UnsupportedReward("this reward needs observations other than one image")
    hides = any(layer.hides_terminations for layer in layers)
    layer: Any = adding[0] if adding else None
    return RewardCamera(layer, hides)


def added_name(layer: Any) -> str:
    return next(name for name in layer.spec.obs if name not in layer.env.spec.obs)


def is_image(layer: Wrapper) -> bool:
    return layer.spec.obs[added_name(layer)].is_image


DRAWS = 8
AXES = ("_x", "_y", "_z")


# Plan preview: the tool's path under an action chunk, rolled out in a copy of the environment.
# The chosen chunk and chunks for other noise samples become paths of the tool; their spread shows
# how certain the policy is.
class PlanPreview:
    """Rolls out chunks in an environment that `make(n)` makes with n parallel envs, when first
    needed.

    `tip` is None, and there is nothing to preview, if no observation names a position (`tool_x`,
    `tool_y`, `tool_z`).
    """

    def __init__(self, spec: Spec, make: Callable[[int], VecEnv]) -> None:
        self.tip, self.make = tip_of(spec), make
        self._copy: VecEnv | None = None

    def paths(self, before: Moment, after: Moment, acts: object) -> list[Array]:
        """Paths [H + 1, 3] (m) of the chunk that was decided at `before` and first executed at
        `after`, then of chunks for other noise samples. Empty if the environment's state cannot be
        restored or the policy has no chunks."""
        plan = after.plan
        if self.tip is None or plan is None or len(plan) < 2 or not isinstance(acts, Actor):
            return []
        if before.state is None or plan.ndim < 2:
            return []
        with forked(before.step):
            plans = torch.cat([plan[None], sampled(acts.policy, before, after, DRAWS - 1)])
        return self._rolled(before, plans)

    def trail(self, moments: list[Moment]) -> Array | None:
        """The tool's position at every step, [T, 3]; None if it is not observed."""
        if self.tip is None or len(moments) < 2:
            return None
        return np.concatenate([place_of(moment.next_obs, self.tip) for moment in moments])

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()

    @torch.no_grad()
    def _rolled(self, before: Moment, plans: Tensor) -> list[Array]:
        assert before.state is not None and self.tip is not None
        if self._copy is None:
            self._copy = self.make(DRAWS)
            self._copy.reset(0)
        copy = self._copy
        same = torch.zeros(len(plans), dtype=torch.int64)
        try:
            obs = copy.set_state(tt.take(before.state, same))
        except NotSavable:
            return []
        places = [place_of(obs, self.tip)]
        running = torch.ones(len(plans), dtype=torch.bool)
        ends = torch.full((len(plans),), plans.shape[1] + 1)
        for t in range(plans.shape[1]):
            step = copy.step(plans[:, t])
            places.append(place_of(step.next_obs, self.tip))
            ends = torch.where(running & step.ended, t + 2, ends)
            running &= ~step.ended
        return [path[: int(end)] for path, end in zip(np.stack(places, 1), ends, strict=True)]


@torch.no_grad()
def sampled(policy: Policy, before: Moment, after: Moment, count: int) -> Tensor:
    """Chunks [count, H, A] of `policy` for other noise samples at `before`, the decision that led
    to `after`."""
    same = torch.zeros(count, dtype=torch.int64)
    device = device_of(policy)
    obs = tt.to(tt.take(before.obs, same), device)
    carry = carried(policy, before, after, same)
    noise = policy.sample_noise(count, True)
    seen, carry = policy.observe(obs, carry, noise)
    return policy.act(seen, carry, noise)[0].cpu()


def carried(policy: Policy, before: Moment, after: Moment, rows: Tensor) -> Tensors:
    """The recurrent state of `policy` at the decision between `before` and `after`, repeated for
    each of `rows` [n] (zeros)."""
    old, new = before.policy_state, after.policy_state
    if old is None or new is None or old.name != new.name or before.step == 0:
        return policy.initial(len(rows))
    return tt.take(tt.under(old.actor, "carry"), rows)


def tip_of(spec: Spec) -> tuple[str, int] | None:
    """The observation and index of the first three elements named NAME_x, NAME_y and NAME_z; None
    if there are none."""
    for name, leaf in spec.obs.items():
        for at, word in enumerate(leaf.names[:-2]):
            stem = word.removesuffix("_x")
            if stem != word and leaf.names[at : at + 3] == tuple(stem + axis for axis in AXES):
                return name, at
    return None


def place_of(obs: Tensors, tip: tuple[str, int]) -> Array:
    name, at = tip
    return obs[name][:, at : at + 3].double().cpu().numpy()


GRID = 8
"""Patches along each side of an image."""
HOT = (213, 94, 0)
LEAST = 1e-6


# Saliency by occlusion: which image patches change the policy's action chunk most. Occlusion
# (Zeiler and Fergus, 2014): s[i, j] = mean |pi(o with patch i, j grey, w) - pi(o, w)| over the
# chunk, in units of the action, for one noise w. It only evaluates the policy, so it works for
# every network.
def pictures_of(policy: Policy) -> list[str]:
    return [name for name, leaf in policy.spec.obs.items() if leaf.is_image and not hidden(name)]


@torch.no_grad()
def saliency(policy: Policy, before: Moment, after: Moment, grid: int = GRID) -> dict[str, Tensor]:
    """By image name, how much each patch [grid, grid] changes the chunk that `policy` decided
    between `before` and `after`."""
    device = device_of(policy)
    with forked(before.step):
        noise = policy.sample_noise(1)
    found: dict[str, Tensor] = {}
    for name in pictures_of(policy):
        covered = occluded(before.obs[name][0], grid)
        same = torch.zeros(len(covered), dtype=torch.int64)
        obs = tt.to({**tt.take(before.obs, same), name: covered}, device)
        seen, carry = policy.observe(obs, carried(policy, before, after, same), noise[same])
        chunks = policy.act(seen, carry, noise[same])[0].float()  # [1 + grid^2, H, A]
        change = (chunks[1:] - chunks[:1]).abs().flatten(1).mean(1)
        found[name] = change.view(grid, grid).cpu()
    return found


def occluded(picture: Tensor, grid: int) -> Tensor:
    """`picture` [H, W, C] itself, then with each of grid x grid patches replaced by its mean
    colour, [1 + grid^2, H, W, C]."""
    high, wide = picture.shape[:2]
    mean = picture.float().mean((0, 1)).round().to(picture.dtype)
    rows = torch.arange(high) * grid // high
    columns = torch.arange(wide) * grid // wide
    patch = rows[:, None] * grid + columns
    which = torch.arange(-1, grid * grid)[:, None, None]
    return torch.where((patch == which)[..., None], mean, picture)


def heated(value: Tensor, leaf: Leaf, change: Tensor, most: float) -> Picture:
    """One image [H, W, C] in grey, orange where `change` [grid, grid] is near `most`."""
    picture = picture_of(value, leaf).astype(np.float32)
    high, wide = picture.shape[:2]
    heat = functional.interpolate(change[None, None], (high, wide), mode="bilinear")[0, 0]
    share: NDArray[np.float32] = (heat / max(most, LEAST)).clamp(0, 1).numpy()[..., None]
    grey = 0.35 * picture.mean(2, keepdims=True) + 0.65 * 160
    return ((1 - share) * grey + share * np.array(HOT)).round().astype(np.uint8)


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


VALUE, MODEL = "value", "reward of the run"
ValueFunction = Callable[[Actor], Tensor]


class StepOverlay:
    """Evaluates the critic `value` and the `reward` on each step, and what the run's model
    imagines; any may be None.

    `camera` captures the images that the reward is computed from. If the critic or the reward fails
    on this environment's data, it is dropped, and `trouble` says why.
    """

    def __init__(
        self,
        value: ValueFunction | None,
        reward: Reward | None,
        gamma: float,
        camera: RewardCamera | None = None,
        imagination: Imagination | None = None,
    ) -> None:
        self.imagination = imagination
        self.value, self.reward, self.gamma = value, reward, gamma
        self.camera = camera or RewardCamera()
        self.trouble = ""
        self._last: float | None = None

    def reset(self) -> None:
        self._last = None
        if self.imagination is not None:
            self.imagination.reset()

    def reward_image(self) -> CompressedImage | None:
        """The image for the reward in the current state; None if the reward needs none."""
        return None if self.reward is None else self.camera.capture()

    @torch.no_grad()
    def numbers(self, before: Moment, after: Moment, acts: object) -> dict[str, float]:
        """The value and the reward (components) of the step from `before` to `after`, by name."""
        found: dict[str, float] = {}
        if self.value is not None and isinstance(acts, Actor):
            found |= self._guarded(lambda: self._critic_value(after, acts), "value")
        if self.reward is not None:
            found |= self._guarded(lambda: self._reward_numbers(before, after), "reward")
        if (imagined := self.imagination) is not None:
            found |= self._guarded(lambda: imagined.numbers(before, after), "imagination")
        return found

    def _guarded(self, compute: Callable[[], dict[str, float]], what: str) -> dict[str, float]:
        try:
            return compute()
        except (RuntimeError, KeyError, ConfigError, NotImplementedError) as error:
            setattr(self, what, None)
            said = "critic" if what == "value" else what
            self.trouble = f"{said} not shown: {error}"[:200]
            return {}

    def _critic_value(self, after: Moment, acts: Actor) -> dict[str, float]:
        if after.is_decision and self.value is not None:
            self._last = float(self.value(acts)[0])
        return {} if self._last is None else {VALUE: self._last}

    def _reward_numbers(self, before: Moment, after: Moment) -> dict[str, float]:
        assert self.reward is not None
        camera = self.camera
        image = camera.observation(after.reward_image)
        if image and isinstance(self.reward, ScoresImages):
            return {SCORE: float(self.reward.score(*image.values())[0])}
        assert after.action is not None
        ended = after.end == "ended" and not camera.hides_terminations
        transition: Tensors = {
            **tt.nest(before.obs, "obs"),
            **tt.nest(after.next_obs, "next_obs"),
            "action": torch.tensor([after.action]),
            "reward": torch.tensor([after.reward]),
            "discount": torch.tensor([0.0 if ended else self.gamma]),
            **tt.nest(camera.observation(before.reward_image), "obs"),
            **tt.nest(image, "next_obs"),
        }
        if isinstance(self.reward, HasComponents):
            parts = self.reward.components(transition)
            return {f"{TERM}{name}": float(value[0]) for name, value in parts.items()}
        return {MODEL: float(self.reward(transition)[0])}


def make_step_overlay(
    folder: Path, policy: Callable[[], Policy], env: VecEnv
) -> StepOverlay | None:
    """The overlay for the newest checkpoint of run `folder`; None if it has neither critic nor
    reward nor model.

    `policy` loads the policy of that checkpoint, `env` is the displayed environment.
    """
    try:
        saved = checkpoint.find(folder)
    except CheckpointError:
        return None
    file = folder / "run.yaml"
    trained = read_run_settings(file) if file.exists() else {}
    gamma = float((trained.get("learner") or {}).get("gamma", 0.99))
    reward, camera = _reward(folder, policy, gamma, env) if trained.get("reward") else (None, None)
    value = _value_function(saved, trained, policy) if trained.get("learner") else None
    imagined = imagination_of(trained.get("env"), env.spec)
    if reward is None and value is None and imagined is None:
        return None
    return StepOverlay(value, reward, gamma, camera, imagined)


def _reward(
    folder: Path, policy: Callable[[], Policy], gamma: float, env: VecEnv
) -> tuple[Reward | None, RewardCamera | None]:
    """The run's trained reward and the camera for it; (None, None) if the displayed environment
    lacks observations that the reward needs."""
    try:
        node, state = of_run(folder)
        reward = make_reward(node, state, policy().spec, gamma)
        return reward, reward_camera(reward, env)
    except (ConfigError, CheckpointError, KeyError, RuntimeError):
        return None, None


def _value_function(
    saved: Path, trained: Node, policy: Callable[[], Policy]
) -> ValueFunction | None:
    """The critic saved in learner.pt: Q of the chosen action, or V of the observation."""
    if not (saved / "learner.pt").exists():
        return None
    try:
        learner = load_learner(saved, trained, policy())
    except CheckpointError as error:
        warnings.warn(f"{error}; its critic is not shown", ContractWarning, stacklevel=2)
        return None
    except MALFORMED:
        return None
    # The minimum over the learner's critics, or its value network; None if it has neither.
    critic: Any = getattr(learner, "critic", None)
    if critic is not None and hasattr(critic, "each") and getattr(critic, "out", 0) == 1:
        return lambda acts: critic(acts.decision_obs, acts.stored_action).amin(0)
    value: Any = getattr(learner, "value", None)
    if isinstance(value, nn.Module) and not hasattr(value, "memory"):
        return lambda acts: value(acts.decision_obs)
    return None
