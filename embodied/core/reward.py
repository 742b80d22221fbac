"""Reward functions: the contract between a reward and training.

A `Reward` maps transitions to numbers; a class that settings name has it as a base class. The other
protocols are optional: a reward that implements one of them, by its methods alone, takes part in
that stage of training as well.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from embodied.core.env import Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors

End = Literal["obs", "next_obs"]


class Reward(Protocol):
    """Maps transitions to rewards. A frozen reward is applied once, when transitions are stored; a
    learned one is applied whenever they are sampled, so that old transitions always have the
    current reward."""

    frozen: bool
    sums_steps: bool = False  # of n steps: the discounted sum of the rewards of its decisions
    needs_local_env: bool = False  # the environment has to run in its process, not in actors

    def __call__(self, transitions: Tensors, /) -> Tensor:
        """Rewards [N] (float32) of N transitions with the keys `obs/*`, `action`, `next_obs/*`,
        `reward` (that of the environment) and `discount`."""
        ...

    def update(self, transitions: Tensors, /) -> dict[str, Tensor]:
        """Learn from a sampled batch; returns metrics. Not called where `frozen`."""
        return {}


class SummedReward(Reward):
    """A reward that is the sum of its components."""

    @abstractmethod
    def components(self, transitions: Tensors, /) -> Tensors:
        """Each component by name, [N] (float32), weighted."""

    def __call__(self, transitions: Tensors, /) -> Tensor:
        return sum(self.components(transitions).values(), start=0 * transitions["reward"])


class Potential(Protocol):
    """A function of a state, at one end of transitions."""

    @abstractmethod
    def __call__(self, transitions: Tensors, end: End = "next_obs") -> Tensor:
        """Values [N] (float32) at the observations `end` of transitions."""


@runtime_checkable
class AugmentsEnv(Protocol):
    """A reward that needs observations that the policy does not get: images or captions."""

    def augment_env(self, env: VecEnv, /) -> VecEnv:
        """`env` wrapped so that these are further `privileged/*` observations. Training steps the
        wrapped environment; policy and learner are built for the original one. Raises ConfigError
        where the environment cannot provide them."""
        ...


@runtime_checkable
class AugmentsEpisodes(Protocol):
    """A reward whose added observations can be computed for recorded episodes too."""

    def augment_episode(self, obs: Tensors, /) -> Tensors:
        """What `augment_env` would have added to the T observations (leaves [T, ...], the final one
        included) of an episode: leaves [T, ...]."""
        ...


@runtime_checkable
class AsksAboutEpisodes(Protocol):
    """A reward that asks a model about each recorded episode (`augment_episode`)."""

    @property
    def unanswered(self) -> int:
        """Episodes so far about which the model gave no usable answer."""
        ...


@runtime_checkable
class AddedObservation(Protocol):
    """A wrapper, returned by `AugmentsEnv.augment_env`, that adds one observation for the reward.

    The viewer shows what it adds, if that is an image, beside the reward's score.
    """

    def added_observation(self, env_id: int, /) -> Tensor:
        """The added observation of parallel env `env_id` after the last step, without the batch
        dimension; the final one of an episode that this step ended."""
        ...


@runtime_checkable
class ObservesSteps(Protocol):
    """A reward that collects experience of its own: pairs to compare, captions, success labels; or
    an off-policy learner that keeps statistics of the newest steps."""

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step, /) -> None:
        """Called with the n `transitions` that `step` completed, before they are rewarded and
        stored. `env_ids` [n] (int64) says which parallel env each one comes from:
        `step.ended[env_ids]` are those that end an episode, `step.log["success"][env_ids]` those
        that succeeded."""


@runtime_checkable
class FollowsPolicy(Protocol):
    """A reward that learns from how the policy that maximises it would change with it."""

    def follow(self, policy: Policy, /) -> None:
        """Called once, before training, with the policy that is trained; ConfigError if it cannot
        follow this one. It changes no parameter of the policy, and no gradient."""


@runtime_checkable
class RestartsCritic(Protocol):
    """A reward that may change so much that what the critic learned of it is of no use."""

    restarts_critic: bool  # whether it ever does

    def take_restart(self) -> int | None:
        """How many updates to make at once with a new critic, off-policy, where the last step
        changed the reward so much; None otherwise. Each restart is returned once."""
        ...


@runtime_checkable
class LearnsFromRollouts(Protocol):
    """A learned reward for on-policy learners that needs their batches in the order of time."""

    def update_rollout(self, rollout: Tensors, /) -> dict[str, Tensor]:
        """In place of `update`: learn from a batch [T, B] as learners get it, with the rewards and
        discounts of the environment, which may be overwritten later; returns metrics."""
        ...

    def discounts(self, rollout: Tensors, /) -> Tensor:
        """The discounts [T, B] by which the learner learns from such a batch, without gradients;
        0 where those of the batch are."""
        ...


@runtime_checkable
class Scheduled(Protocol):
    """A reward that changes with training progress."""

    def set_step(self, step: int, /) -> None:
        """`step` environment steps are done. Called before transitions are stored or sampled."""


@runtime_checkable
class Stateful(Protocol):
    """A reward with a state that checkpoints must hold, for an exact resume."""

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any], /) -> None: ...


@runtime_checkable
class HasComponents(Protocol):
    """A reward that is a sum of named components."""

    def components(self, transitions: Tensors, /) -> dict[str, Tensor]:
        """Each component by name, [N] (float32), weighted: they add up to the reward, but for a
        final scaling or clipping of the whole."""
        ...


@runtime_checkable
class NeedsColumns(Protocol):
    """A reward or learner that needs flags of `Step.log` beside the columns of a transition."""

    # Names of boolean columns: `("intervened",)`; that one and `real` are true in demonstrations
    # without them. A learner that reads episodes may also name those of OFFLINE_COLUMNS.
    extra_columns: tuple[str, ...]


# Of a recorded step: the position in `demos` of its dataset, the number of its episode (int64),
# whether it is a person's in an episode in which a policy acted too (bool), and its place among all
# steps that were read (int64).
OFFLINE_COLUMNS = ("source", "episode", "correction", "place")


def extra_columns(part: object) -> tuple[str, ...]:
    """The flags that a reward or learner needs beside the standard columns; none for most."""
    return part.extra_columns if isinstance(part, NeedsColumns) else ()
