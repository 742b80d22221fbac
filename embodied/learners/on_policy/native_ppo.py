"""PPO's epochs in native code (ppo.cpp): small MLPs spend most of an update between the operations.

The reference is `Ppo._step`; parameters agree to 1e-5 after 300 updates
(tests/learners/test_native.py). What it does not support is trained by the reference.
"""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embodied.core import distributed
from embodied.core.tensors import Tensors, under
from embodied.learners.critics import RecurrentValue, Value
from embodied.learners.on_policy.ppo_parts import LearningRates
from embodied.nn import native
from embodied.nn.native import Moments, activation_of, dense, moments, parameter, plain
from embodied.nn.optim import Adam
from embodied.policies.diagonal_gaussian import DiagonalGaussian
from embodied.policies.networks.encoders import Encoder

SOURCE = Path(__file__).with_name("ppo.cpp")
METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clipped", "grad_norm")
INPUTS = ("actor_input", "critic_input", "action", "old", "value", "target", "advantage")


class Learner(Protocol):
    """What native code uses of `Ppo`."""

    config: Any  # ppo.Config
    policy: Any
    value: Value | RecurrentValue
    optims: dict[str, Adam]
    lr: LearningRates


class Table(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in (*INPUTS, "order"))


class Settings(ctypes.Structure):
    _fields_ = (
        ("adam", ctypes.c_double * 4),
        *((name, ctypes.c_double) for name in ("clip", "value_clip", "value_weight", "entropy")),
        *((name, ctypes.c_double) for name in ("grad_clip", "step", "target_kl")),
        ("rates", ctypes.c_double * 2),
        *((name, ctypes.c_int64) for name in ("normalize", "size", "count", "played")),
    )


class NativePpo:
    """The epochs of one update of `learner` from `table`: decisions [N, ...]."""

    def __init__(self, learner: Learner, table: Tensors) -> None:
        policy = learner.policy
        assert isinstance(policy, DiagonalGaussian)
        self.learner = learner
        self.policy = policy
        self.library = native.load(SOURCE)
        with torch.no_grad():
            obs = under(table, "obs")
            features = {
                "actor_input": policy.encoder(obs),
                "critic_input": learner.value.encoder(obs),
            }
        inputs = {**features, **{key: table[key] for key in INPUTS[2:]}}
        self.inputs = {
            key: leaf.flatten(1).contiguous() for key, leaf in inputs.items() if leaf.ndim > 1
        }
        self.inputs |= {key: leaf.contiguous() for key, leaf in inputs.items() if leaf.ndim == 1}
        for adam in learner.optims.values():
            adam.prepare()

    def __call__(self, order: Tensor, size: int) -> Tensors:
        """Minibatches of `size` in `order` [N]; returns the metrics of each, [count]."""
        count = len(order) // size
        learner = self.learner
        metrics = torch.zeros(count, len(METRICS))
        scale = ctypes.c_double(learner.lr.scale)
        places = {key: native.address(leaf) for key, leaf in self.inputs.items()}
        table = Table(**places, order=native.address(order))
        actor, critic = self._network(self.policy.net, 0), self._network(learner.value.net, 1)
        deviation = parameter(self.policy.log_std, self._moments(), 0)
        self.library.ppo_epoch(
            ctypes.byref(self._settings(size, count)),
            ctypes.byref(table),
            *actor,
            *critic,
            ctypes.byref(deviation),
            ctypes.byref(scale),
            ctypes.c_void_p(metrics.data_ptr()),
        )
        for adam in learner.optims.values():  # what the reference does after each step
            adam.advance(count)
        learner.lr.lr_scale.fill_(scale.value)
        learner.lr.write(learner.optims.values())
        found: Tensors = dict(zip(METRICS, metrics.unbind(1), strict=True))
        return found if learner.config.grad_clip else {k: found[k] for k in METRICS[:-1]}

    def _settings(self, size: int, count: int) -> Settings:
        config = self.learner.config
        learner = self.learner
        adam = next(iter(learner.optims.values()))
        group = adam.param_groups[0]
        return Settings(
            (*group["betas"], group["eps"], group["weight_decay"]),
            clip=config.clip,
            value_clip=config.value_clip,
            value_weight=config.value_weight,
            entropy=config.entropy,
            grad_clip=config.grad_clip,
            step=adam.count,
            target_kl=config.target_kl if config.schedule == "adaptive" else 0.0,
            rates=tuple(learner.lr.base_lrs.tolist()),
            normalize=config.advantage == "minibatch",
            size=size,
            count=count,
            played=self.inputs["action"].shape[1],
        )

    def _network(self, net: nn.Sequential, rate: int) -> tuple[object, ...]:
        """The arguments of one network: its parameters, their number, its activation."""
        array = dense(net, self._moments(), rate)
        return array, ctypes.c_int64(len(array)), ctypes.c_int64(activation_of(net))

    def _moments(self) -> Moments:
        return moments(self.learner.optims.values())


def use(learner: Learner) -> None:
    """Let native code train on the minibatches of `learner`."""
    setattr(learner, "_epochs", partial(NativePpo, learner))  # noqa: B010 - it replaces a method


def obstacle(learner: Learner) -> str | None:
    """Why `learner` cannot be trained by native code; None if it can."""
    policy = learner.policy
    config = learner.config
    if not isinstance(policy, DiagonalGaussian) or type(policy) is not DiagonalGaussian:
        return f"the policy is {type(policy).__name__}, not DiagonalGaussian"
    if distributed.world() > 1 or torch.get_num_threads() > 1:
        return "it runs in one process on one thread"
    if policy.config.net or policy.config.extractor:
        return "the policy has an own network"
    if config.compile or config.cuda_graph:
        return "compile or cuda_graph is set"
    if policy.log_std.device.type != "cpu":
        return "the parameters are not on the CPU"
    encoders: tuple[Encoder, ...] = (policy.encoder, learner.value.encoder)
    if any(p.requires_grad for encoder in encoders for p in encoder.parameters()):
        return "images or points are encoded by networks"
    frozen = any(
        not p.requires_grad for net in (policy.net, learner.value.net) for p in net.parameters()
    )
    if frozen or not (plain(policy.net) and plain(learner.value.net)):
        return "a network is not linear layers with tanh or ReLU, all trained"
    try:
        native.load(SOURCE)
    except native.NativeError as error:
        return str(error)
    return None
