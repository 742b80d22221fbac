"""SAC's update in native code (sac.cpp): PyTorch spends much of an update between the operations.

The reference is `Sac._step`; one update from the same state agrees with it to 1e-5 or better, along
a training (tests/learners/test_native.py). What it does not support is trained by the reference.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embodied.core import distributed
from embodied.core.tensors import Tensors
from embodied.learners.critics import Critic
from embodied.nn import native
from embodied.nn.native.networks import (
    Network,
    Parameter,
    members,
    moments,
    network,
    norm_places,
    parameter,
    plain,
    plain_members,
    transitions,
)
from embodied.nn.optim import Adam
from embodied.policies.gaussian import Gaussian

SOURCE = Path(__file__).with_name("sac.cpp")
OPTIMIZERS = ("critic", "actor", "temperature")
INPUTS = ("actor_input", "critic_input", "next_actor_input", "next_critic_input")
INPUTS = (*INPUTS, "action", "noise", "next_noise", "reward", "discount", "chosen")
METRICS = ("critic_loss", "q_mean", "actor_loss", "entropy", "temperature")


class Learner(Protocol):
    """What native code uses of `Sac`."""

    config: Any  # sac.Config
    policy: Any
    critic: Critic
    target: Critic
    optims: dict[str, Adam]
    critic_params: list[Tensor]
    target_params: list[Tensor]
    actor_params: list[Tensor]
    log_alpha: nn.Parameter
    entropy: float


class Settings(ctypes.Structure):
    _fields_ = (
        ("adam", ctypes.c_double * 12),
        ("rates", ctypes.c_double * 3),
        ("steps", ctypes.c_double * 3),
        *((name, ctypes.c_double) for name in ("tau", "low", "high", "entropy")),
        *((name, ctypes.c_int64) for name in ("size", "slices", "played", "subset")),
        *((name, ctypes.c_int64) for name in ("soft", "squashes", "entropic", "mean", "acts")),
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
        ("critics", ctypes.POINTER(Network)),
        ("targets", ctypes.POINTER(Network)),
        ("members", ctypes.c_int64),
        ("log_alpha", Parameter),
    )


class NativeSac:
    """The updates of `learner`, in place of its `_step`; knows where its tensors are."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.places: tuple[int, ...] = ()
        self.networks = Networks()
        self.norms: list[tuple[int, ...]] = []
        self.work = ctypes.c_void_p()
        self.end: weakref.finalize[Any, NativeSac] | None = None

    def __deepcopy__(self, memo: Any) -> NativeSac:
        """A copy for the copied learner, whose tensors are elsewhere."""
        return NativeSac(copy.deepcopy(self.learner, memo))

    @torch.no_grad()
    def __call__(self, acts: bool, batch: Tensors) -> Tensors:
        """One update; `acts`: with a step of policy and temperature, as in `Sac._step`."""
        learner = self.learner
        if "weight" in batch:  # prioritised sampling wants each error
            with torch.enable_grad():
                return type(learner)._step(learner, acts, batch)  # type: ignore[attr-defined]
        self._find(learner)
        inputs = table(learner, batch, acts)
        metrics = torch.empty(len(METRICS))
        places = (native.address(inputs[key]) for key in INPUTS)
        native.load(SOURCE).sac_update(
            self.work,
            ctypes.byref(settings(learner, inputs["action"], acts)),
            ctypes.byref(Table(*places, *self.norms)),
            ctypes.byref(self.networks),
            ctypes.c_void_p(metrics.data_ptr()),
        )
        learner.optims["critic"].advance(learner.config.utd)
        if acts:
            learner.optims["actor"].advance(1)
            learner.optims["temperature"].advance(1)
        names = METRICS[: len(METRICS) if acts else 2]
        return dict(zip(names, metrics.unbind(), strict=False))

    def _find(self, learner: Learner) -> None:
        """Look where the tensors are, if they are not where they were."""
        for adam in learner.optims.values():
            adam.prepare()
        pairs = [pair for adam in learner.optims.values() for _, pair in adam.moments()]
        tensors = [moment for pair in pairs for moment in pair]  # a loaded state replaces them
        tensors += [*learner.critic_params, *learner.target_params, *learner.actor_params]
        places = tuple(tensor.data_ptr() for tensor in tensors)
        if places == self.places:
            return
        self.places = places
        known = moments(learner.optims.values())
        critics = members(learner.critic.ensemble, known, OPTIMIZERS.index("critic"))
        targets = members(learner.target.ensemble, {}, 0)
        self.networks = Networks(
            network(learner.policy.net, known, OPTIMIZERS.index("actor")),
            (Network * len(critics))(*critics),
            (Network * len(targets))(*targets),
            len(critics),
            parameter(learner.log_alpha, known, OPTIMIZERS.index("temperature")),
        )
        self.norms = [norm_places(part.encoder) for part in (learner.policy, learner.critic)]
        code = native.load(SOURCE)
        code.sac_begin.restype = ctypes.c_void_p
        if self.end is not None:
            self.end()
        begun = code.sac_begin(ctypes.byref(self.networks), learner.policy.size)
        self.work = ctypes.c_void_p(begun)
        self.end = weakref.finalize(self, code.sac_end, self.work)


def use(learner: Learner) -> None:
    """Let native code do the updates of `learner`."""
    setattr(learner, "_step", NativeSac(learner))  # noqa: B010 - it replaces a method


def settings(learner: Learner, action: Tensor, acts: bool) -> Settings:
    """The settings of this update as native code reads them."""
    config = learner.config
    adams = [learner.optims[name] for name in OPTIMIZERS]
    groups = [adam.param_groups[0] for adam in adams]
    betas = [(*group["betas"], group["eps"], group["weight_decay"]) for group in groups]
    return Settings(
        tuple(value for each in betas for value in each),
        tuple(group["lr"] for group in groups),
        tuple(adam.count for adam in adams),
        *(config.tau, *learner.policy.config.log_std, learner.entropy),
        *(len(action) // config.utd, config.utd, learner.policy.size, config.subset),
        *(learner.policy.config.soft, learner.policy.squashes, config.entropy_in_backup),
        *(config.actor_objective == "mean", acts),
    )


def table(learner: Learner, batch: Tensors, acts: bool) -> Tensors:
    """The inputs of an update [n, ...], one row per transition, and what the reference draws at
    random, in its order: for each slice noise and critics, then noise for the policy's step."""
    config, policy = learner.config, learner.policy
    inputs = transitions(policy, learner.critic, batch)
    size = len(batch["reward"]) // config.utd
    noise, chosen = [], []
    for _ in range(config.utd):
        noise.append(policy.sample_noise(size, True))
        members = torch.arange(config.critics)
        if config.subset < config.critics:
            members = torch.rand(config.critics).topk(config.subset).indices
        chosen.append(members)
    inputs |= {"next_noise": torch.cat(noise), "chosen": torch.cat(chosen)}
    inputs["noise"] = policy.sample_noise(size, True) if acts else noise[0]
    return {key: leaf.contiguous() for key, leaf in inputs.items()}


def obstacle(learner: Learner) -> str | None:
    """Why `learner` cannot be trained by native code; None if it can."""
    policy, config = learner.policy, learner.config
    if learner.critic.ensemble.active is not None:
        return "its active units are measured"
    if type(policy) is not Gaussian:
        return f"the policy is {type(policy).__name__}, not Gaussian"
    if distributed.world() > 1 or torch.get_num_threads() > 1:
        return "it runs in one process on one thread"
    if policy.config.net or policy.config.extractor:
        return "the policy has an own network"
    if config.compile or config.cuda_graph:
        return "compile or cuda_graph is set"
    parameters = list(policy.net.parameters())
    if parameters[0].device.type != "cpu":
        return "the parameters are not on the CPU"
    encoders = (policy.encoder, learner.critic.encoder)
    if any(True for encoder in encoders for _ in encoder.parameters()):
        return "images or points are encoded by networks"
    if not (plain(policy.net, norms=True) and plain_members(learner.critic.ensemble, norms=True)):
        return "a network is not linear layers, LayerNorm, and tanh or ReLU"
    if not all(p.requires_grad for p in [*parameters, *learner.critic.parameters()]):
        return "a network is not trained"
    try:
        native.load(SOURCE)
    except native.NativeError as error:
        return str(error)
    return None
