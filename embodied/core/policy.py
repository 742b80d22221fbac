"""Policy: maps observations and noise to an action chunk; PolicyWrapper: wraps a trained policy.

A policy is deterministic given its arguments: all randomness enters through `noise`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn

from embodied.core.build import ConfigError, build, plain
from embodied.core.saved_file import SavedFile
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors


class Policy(nn.Module):
    """Base class of policies, for training, evaluation, the viewer and real robots.

    One decision calls `observe` and then `act`, both with the same noise:

        noise = policy.sample_noise(n, explore)
        decision_obs, carry = policy.observe(obs, carry, noise)
        actions, carry = policy.act(decision_obs, carry, noise)

    Because randomness enters through `noise` only, a decision can be replayed, exported or captured
    in a CUDA graph. Normalisers are part of the policy: observations come in their own units,
    images as uint8 HWC. `carry` (recurrent state, the plan of a frozen base) is a dict of tensors
    [n, ...] that is passed to the next decision. Its keys below `row/` describe the decision just
    made and are stored with its transition; `row/action` replaces the executed chunk as the action
    that a learner sees. If the carry has the key `executed_steps` [n] (int64), the caller sets it
    before each decision to the number of executed actions of the previous plan.

    Keys `history/NAME` [n, k, ...] of the carry (also below the prefix of an inner policy) are the
    observations NAME of the k control steps before this one, oldest first; `fresh` [n] (bool)
    beside them marks rows that have none yet. The caller updates them at every step, also between
    decisions (`core.tensors`). `observe` adds them to the decision's observation under the
    same keys; a decision whose observation has them already does not depend on the carry.
    """

    spec: Spec
    chunk: int = 1
    noise_steps: int = 0  # if > 0, the noise [n, ...] is one vector for each of so many time steps
    saved_file: SavedFile | None = None  # that its parameters are from (`checkpoint.load_policy`)
    requires_base: ClassVar[bool] = False  # training needs a trained base policy (`init=RUN`)
    node: dict[str, Any]  # the configuration it was built from, saved in policy.yaml

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        config = kwargs.get("config", args[0] if args else None)
        if is_dataclass(config) and not isinstance(config, type):  # built without a node
            target = f"{cls.__module__}.{cls.__qualname__}"
            self.__dict__["node"] = {"_target_": target, **plain(asdict(config))}
        return self

    def initial(self, n: int) -> Tensors:
        """The carry of `n` parallel environments at the start of an episode."""
        return {}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        """Noise [n, ...] for one decision, from torch's default generator. A generative policy
        always samples its noise; a policy that uses noise for exploration only returns zeros unless
        `explore`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement sample_noise")

    @property
    def augments(self) -> bool:
        """Whether `observe` adds to the observation."""
        return type(self).observe is not Policy.observe

    def observe(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensors, Tensors]:
        """The observation of this decision, and the carry; a residual policy adds its base's
        action to the observation."""
        return obs, carry

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        """Actions [n, chunk, A] in [-1, 1] (int64 [n, chunk] if discrete), and the next carry.
        Elements that are choices (`Leaf.classes`) are the number of a class."""
        raise NotImplementedError(f"{type(self).__name__} does not implement act")

    def loss(self, batch: Tensors) -> Tensor:
        """Imitation loss [n] of a batch with `obs/*`, `action` [n, H, A], `valid` [n, H] (bool)."""
        raise NotImplementedError(f"{type(self).__name__} has no imitation loss")

    def warmup_policy(self) -> Policy:
        """The policy that collects data before the first update; by default this policy."""
        return self

    def inference_policy(self) -> Policy:
        """The policy that is saved and deployed, without parts that only training needs; acts the
        same as this policy without exploration. By default this policy."""
        return self

    @property
    def feature_size(self) -> int:
        """The number of `features`; 0 if the policy has none. By default those of the attribute
        `encoder`, a module with `size`."""
        return int(getattr(getattr(self, "encoder", None), "size", 0))

    def features(self, obs: Tensors) -> Tensor:
        """Features [n, feature_size] of the observations, which a steering policy may use instead
        of them. ConfigError if the policy has none."""
        if not self.feature_size:
            raise ConfigError(f"{type(self).__name__} has no encoder whose features could be used")
        return cast(nn.Module, getattr(self, "encoder"))(obs)  # noqa: B009

    def fit(self, rows: Tensors) -> None:
        """Set the normalisers from data (`obs/*`, `action`); by default does nothing."""


class PolicyWrapper(Policy):
    """Base class of policies around a trained base policy: `finetune=NAME init=RUN`. `wrap` builds
    it. A learner then gets `trainable()`, and `with_trained` puts the result back."""

    requires_critic: ClassVar[bool] = False  # `wrap` takes `critic=`, which `eval` finds in the run
    for_evaluation: ClassVar[bool] = False  # can be put around a policy without further training

    @classmethod
    def wrap(
        cls, base: Policy, node: Mapping[str, Any], inner: Mapping[str, Any] | None = None
    ) -> Self:
        """Build `node` around the trained `base`, which keeps its parameters and normalisers.
        `inner` is the node of the policy to train in place of the base (the group `policy=`);
        ConfigError if the wrapper needs one and it is None, or takes none and it is given."""
        if inner is not None:
            raise ConfigError(
                f"{cls.__name__} trains the base policy itself, by another method than this "
                "experiment's: policy=null learner=NAME, or an experiment of that method"
            )
        return cls.build_around(base, node)

    @classmethod
    def build_around(cls, base: Policy, node: Mapping[str, Any]) -> Self:
        """Build `node` with the node and chunk of `base`, and load the base's parameters."""
        own = {key: value for key, value in node.items() if key != "chunk"}
        policy = build({**own, "base": base.node}, cls, spec=base.spec)
        policy.load_base(base)
        return policy

    def load_base(self, base: Policy) -> None:
        """Copy the parameters and normalisers of a trained base policy."""
        own = self.get_submodule("base")
        own.load_state_dict(base.state_dict())
        for name, part in policies_in(base):
            if part.saved_file is not None:
                copy = own.get_submodule(name)
                assert isinstance(copy, Policy)
                copy.saved_file = part.saved_file

    def trainable(self) -> Policy:
        """The policy that the learner trains and whose actions are stored; by default this one."""
        return self

    def with_trained(self, trained: Policy) -> Policy:
        """The whole policy after training; `trained` is the learner's version of `trainable()`."""
        return trained


def policies_in(policy: Policy) -> list[tuple[str, Policy]]:
    """The policy itself and those inside of it, by the name of their submodule."""
    modules = cast(list[tuple[str, nn.Module]], list(policy.named_modules()))  # pyright: ignore
    return [(name, part) for name, part in modules if isinstance(part, Policy)]
