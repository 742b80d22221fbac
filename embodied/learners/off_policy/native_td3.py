"""TD3's update in native code (td3.cpp): with small networks PyTorch spends most of an update
between the operations.

The reference is `Td3._step`; parameters agree to 1e-5 after 300 updates
(tests/learners/test_native.py). What it does not support is trained by the reference.
"""

from __future__ import annotations

import copy
import ctypes
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.tensors import Tensors, under
from embodied.learners.critics import Critic
from embodied.nn import native
from embodied.nn.native import Network, members, moments, network, plain, plain_members
from embodied.nn.optim import Adam
from embodied.policies.deterministic import Deterministic
from embodied.policies.networks.encoders import Encoder

SOURCE = Path(__file__).with_name("td3.cpp")
OPTIMIZERS = ("critic", "actor")
WIDEST = 96  # hidden layer: the equality with the reference was measured up to 70
INPUTS = ("actor_input", "critic_input", "next_actor_input", "next_critic_input")
INPUTS = (*INPUTS, "action", "noise", "reward", "discount")


class Learner(Protocol):
    """What native code uses of `Td3`."""

    config: Any  # td3.Config
    policy: Any
    target_policy: Any
    critic: Critic
    target: Critic
    optims: dict[str, Adam]
    critic_params: list[Tensor]
    target_params: list[Tensor]
    actor_params: list[Tensor]
    target_actor_params: list[Tensor]

    def target_noise(self, action: Tensor) -> Tensor: ...


class Settings(ctypes.Structure):
    _fields_ = (
        ("adam", ctypes.c_double * 8),
        ("rates", ctypes.c_double * 2),
        ("steps", ctypes.c_double * 2),
        ("tau", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("size", "played", "squashes", "follows", "acts")),
    )


class Table(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in INPUTS),
        ("actor", ctypes.c_void_p * 3),
        ("critic", ctypes.c_void_p * 3),
    )


class Networks(ctypes.Structure):
    _fields_ = (
        ("actor", Network),
        ("target_actor", Network),
        ("critics", Network * 2),
        ("targets", Network * 2),
    )


class NativeTd3:
    """The updates of `learner`, in place of its `_step`; knows where its tensors are."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.places: tuple[int, ...] = ()
        self.networks = Networks()
        self.norms: list[tuple[int, ...]] = []

    def __deepcopy__(self, memo: Any) -> NativeTd3:
        """A copy for the copied learner, whose tensors are elsewhere."""
        return NativeTd3(copy.deepcopy(self.learner, memo))

    @torch.no_grad()
    def __call__(self, follows: bool, acts: bool, batch: Tensors) -> Tensors:
        """One update; what it trains besides the critics as in `Td3._step`."""
        learner = self.learner
        self._find(learner)
        inputs = table(learner, batch)
        metrics = torch.empty(3)
        places = (native.address(inputs[key]) for key in INPUTS)
        native.load(SOURCE).td3_update(
            ctypes.byref(settings(learner, inputs["action"], follows, acts)),
            ctypes.byref(Table(*places, *self.norms)),
            ctypes.byref(self.networks),
            ctypes.c_void_p(metrics.data_ptr()),
        )
        learner.optims["critic"].advance(1)
        if acts:
            learner.optims["actor"].advance(1)
        names = ("critic_loss", "q_mean", "actor_loss")[: 3 if acts else 2]
        return dict(zip(names, metrics.unbind(), strict=False))

    def _find(self, learner: Learner) -> None:
        """Look where the tensors are, if they are not where they were."""
        for adam in learner.optims.values():
            adam.prepare()
        pairs = [pair for adam in learner.optims.values() for _, pair in adam.moments()]
        tensors = [moment for pair in pairs for moment in pair]  # a loaded state replaces them
        tensors += [*learner.critic_params, *learner.actor_params]
        tensors += [*learner.target_params, *learner.target_actor_params]
        places = tuple(tensor.data_ptr() for tensor in tensors)
        if places == self.places:
            return
        self.places = places
        known = moments(learner.optims.values())
        self.networks = Networks(
            network(learner.policy.net, known, OPTIMIZERS.index("actor")),
            network(learner.target_policy.net, {}, 0),
            tuple(members(learner.critic.ensemble, known, OPTIMIZERS.index("critic"))),
            tuple(members(learner.target.ensemble, {}, 0)),
        )
        self.norms = [norm_places(part.encoder) for part in (learner.policy, learner.critic)]


def use(learner: Learner) -> None:
    """Let native code do the updates of `learner`."""
    setattr(learner, "_step", NativeTd3(learner))  # noqa: B010 - it replaces a method


def is_vectors(encoder: Encoder) -> bool:
    """Whether it only normalizes vectors, which native code does too."""
    return not (encoder.images or encoder.sets or encoder.symbols is not None)


def norm_places(encoder: Encoder) -> tuple[int, ...]:
    """The addresses of the encoder's normaliser; none where `table` has normalised."""
    if not is_vectors(encoder):
        return ()
    return tuple(
        native.address(x) for x in (encoder.norm.mean, encoder.norm.std, encoder.norm.limit)
    )


def settings(learner: Learner, action: Tensor, follows: bool, acts: bool) -> Settings:
    """The settings of this update as native code reads them."""
    adams = [learner.optims[name] for name in OPTIMIZERS]
    groups = [adam.param_groups[0] for adam in adams]
    betas = [(*group["betas"], group["eps"], group["weight_decay"]) for group in groups]
    return Settings(
        tuple(value for each in betas for value in each),
        tuple(group["lr"] for group in groups),
        tuple(adam.count for adam in adams),
        learner.config.tau,
        *(*action.shape, learner.policy.squashes, follows, acts),
    )


def table(learner: Learner, batch: Tensors) -> Tensors:
    """The inputs of an update [n, ...], one row per transition."""
    inputs: Tensors = {key: batch[key] for key in ("action", "reward", "discount")}
    inputs["noise"] = learner.target_noise(batch["action"])
    for prefix, name in (("", "obs"), ("next_", "next_obs")):
        obs = under(batch, name)
        for part, encoder in (
            ("actor", learner.policy.encoder),
            ("critic", learner.critic.encoder),
        ):
            features = encoder.flat if is_vectors(encoder) else encoder
            inputs[f"{prefix}{part}_input"] = features(obs)
    return {key: leaf.contiguous() for key, leaf in inputs.items()}


def obstacle(learner: Learner) -> str | None:
    """Why `learner` cannot be trained by native code; None if it can."""
    policy = learner.policy
    config = learner.config
    if learner.critic.ensemble.active is not None:
        return "its active units are measured"
    if type(policy) is not Deterministic:
        return f"the policy is {type(policy).__name__}, not Deterministic"
    if distributed.world() > 1 or torch.get_num_threads() > 1:
        return "it runs in one process on one thread"
    if policy.config.net or policy.config.extractor:
        return "the policy has an own network"
    if config.compile or config.cuda_graph or config.atoms:
        return "compile, cuda_graph or atoms is set"
    parameters = list(policy.net.parameters())
    if parameters[0].device.type != "cpu":
        return "the parameters are not on the CPU"
    encoders = (policy.encoder, learner.critic.encoder)
    if any(True for encoder in encoders for _ in encoder.parameters()):
        return "images or points are encoded by networks"
    if not (plain(policy.net) and plain_members(learner.critic.ensemble)):
        return "a network is not linear layers with tanh or ReLU"
    if max((*policy.config.hidden, *config.hidden), default=0) > WIDEST:
        return f"a hidden layer is wider than {WIDEST}"
    if not all(p.requires_grad for p in [*parameters, *learner.critic.parameters()]):
        return "a network is not trained"
    try:
        native.load(SOURCE)
    except native.NativeError as error:
        return str(error)
    return None
