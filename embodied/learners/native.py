"""Native code of PPO (on_policy/ppo.cpp) and TD3 (off_policy/td3.cpp): with small networks PyTorch
spends most of an update between the operations.

The references are `Ppo._step` and `Td3._step`; parameters agree to 1e-5 after 300 updates
(tests/learners/test_native.py). What native code does not support is trained by the reference.
"""

from __future__ import annotations

import copy
import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, under
from embodied.learners.off_policy.td3 import Td3
from embodied.learners.on_policy.ppo import Ppo
from embodied.nn import native
from embodied.nn.native.networks import (
    Network,
    activation_of,
    dense,
    members,
    moments,
    network,
    parameter,
    plain,
    plain_members,
)
from embodied.policies.deterministic import Deterministic
from embodied.policies.diagonal_gaussian import DiagonalGaussian
from embodied.policies.networks.encoders import Encoder

FOLDER = Path(__file__).parent
PPO = FOLDER / "on_policy" / "ppo.cpp"
PPO_METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clipped", "grad_norm")
PPO_INPUTS = ("actor_input", "critic_input", "action", "old", "target", "advantage")
TD3 = FOLDER / "off_policy" / "td3.cpp"
TD3_OPTIMIZERS = ("critic", "actor")
TD3_INPUTS = (
    *("actor_input", "critic_input", "next_actor_input", "next_critic_input"),
    *("action", "noise", "reward", "discount"),
)
WIDEST = 96  # hidden layer of TD3: the equality with the reference was measured up to 70


def obstacle(learner: Ppo | Td3) -> str | None:
    """Why `learner` cannot be trained by native code; None if it can."""
    policy: Any = learner.policy
    config = learner.config
    ppo = isinstance(learner, Ppo)
    kind: type[Policy] = DiagonalGaussian if ppo else Deterministic
    if type(policy) is not kind:
        return f"the policy is {type(policy).__name__}, not {kind.__name__}"
    if distributed.world() > 1 or torch.get_num_threads() > 1:
        return "it runs in one process on one thread"
    if policy.config.net or policy.config.extractor:
        return "the policy has an own network"
    if config.compile or config.cuda_graph:
        return "compile or cuda_graph is set"
    weights = list(policy.net.parameters())
    if weights[0].device.type != "cpu":
        return "the parameters are not on the CPU"
    critic: Any = learner.value if ppo else learner.critic
    encoded = [p for part in (policy, critic) for p in part.encoder.parameters()]
    if any(p.requires_grad for p in encoded) if ppo else encoded:
        return "images or points are encoded by networks"
    if not plain(policy.net) or not (plain(critic.net) if ppo else plain_members(critic.ensemble)):
        return "a network is not linear layers with tanh or ReLU"
    if not all(p.requires_grad for p in (*weights, *(critic.net if ppo else critic).parameters())):
        return "a network is not trained"
    if not ppo:
        if config.atoms:
            return "atoms is set"
        if critic.ensemble.active is not None:
            return "its active units are measured"
        if max((*policy.config.hidden, *config.hidden), default=0) > WIDEST:
            return f"a hidden layer is wider than {WIDEST}"
    try:
        native.load(PPO if ppo else TD3)
    except native.NativeError as error:
        return str(error)
    return None


def use(learner: Ppo | Td3) -> None:
    """Let native code do the updates of `learner`, in place of one of its methods."""
    if isinstance(learner, Ppo):
        learner._epochs = partial(NativePpo, learner)  # pyright: ignore[reportPrivateUsage]
    else:
        learner._step = NativeTd3(learner)  # pyright: ignore[reportPrivateUsage]


class PpoTable(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in (*PPO_INPUTS, "order"))


class PpoSettings(ctypes.Structure):
    _fields_ = (
        ("adam", ctypes.c_double * 4),
        *((name, ctypes.c_double) for name in ("clip", "value_weight", "entropy")),
        *((name, ctypes.c_double) for name in ("grad_clip", "step", "target_kl")),
        ("rates", ctypes.c_double * 2),
        *((name, ctypes.c_int64) for name in ("normalize", "size", "count", "played")),
    )


class NativePpo:
    """The epochs of one update of `learner` from `table`: decisions [N, ...]."""

    def __init__(self, learner: Any, table: Tensors) -> None:
        self.learner = learner
        with torch.no_grad():
            obs = under(table, "obs")
            inputs = {
                "actor_input": learner.policy.encoder(obs),
                "critic_input": learner.value.encoder(obs),
            }
        inputs |= {key: table[key] for key in PPO_INPUTS[2:]}
        self.inputs = {
            key: (leaf.flatten(1) if leaf.ndim > 1 else leaf).contiguous()
            for key, leaf in inputs.items()
        }
        for adam in learner.optims.values():
            adam.prepare()

    def __call__(self, order: Tensor, size: int) -> Tensors:
        """Minibatches of `size` in `order` [N]; returns the metrics of each, [count]."""
        count = len(order) // size
        learner = self.learner
        optims = learner.optims.values()
        known = moments(optims)
        metrics = torch.zeros(count, len(PPO_METRICS))
        scale = ctypes.c_double(float(learner.lr.lr_scale))
        places = {key: native.address(leaf) for key, leaf in self.inputs.items()}
        networks: list[object] = []
        for rate, net in enumerate((learner.policy.net, learner.value.net)):
            layers = dense(net, known, rate)
            networks += [layers, ctypes.c_int64(len(layers)), ctypes.c_int64(activation_of(net))]
        native.load(PPO).ppo_epoch(
            ctypes.byref(self._settings(size, count)),
            ctypes.byref(PpoTable(**places, order=native.address(order))),
            *networks,
            ctypes.byref(parameter(learner.policy.log_std, known, 0)),
            ctypes.byref(scale),
            ctypes.c_void_p(metrics.data_ptr()),
        )
        for adam in optims:  # what the reference does after each step
            adam.advance(count)
        learner.lr.lr_scale.fill_(scale.value)
        learner.lr.write(optims)
        found: Tensors = dict(zip(PPO_METRICS, metrics.unbind(1), strict=True))
        return found if learner.config.grad_clip else {k: found[k] for k in PPO_METRICS[:-1]}

    def _settings(self, size: int, count: int) -> PpoSettings:
        config = self.learner.config
        adam = next(iter(self.learner.optims.values()))
        group = adam.param_groups[0]
        return PpoSettings(
            (*group["betas"], group["eps"], group["weight_decay"]),
            clip=config.clip,
            value_weight=config.value_weight,
            entropy=config.entropy,
            grad_clip=config.grad_clip,
            step=adam.count,
            target_kl=config.target_kl if config.schedule == "adaptive" else 0.0,
            rates=tuple(self.learner.lr.base_lrs.tolist()),
            normalize=config.advantage == "minibatch",
            size=size,
            count=count,
            played=self.inputs["action"].shape[1],
        )


class Td3Settings(ctypes.Structure):
    _fields_ = (
        ("adam", ctypes.c_double * 8),
        ("rates", ctypes.c_double * 2),
        ("steps", ctypes.c_double * 2),
        ("tau", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("size", "played", "squashes", "follows", "acts")),
    )


class Td3Table(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in TD3_INPUTS),
        ("actor", ctypes.c_void_p * 3),
        ("critic", ctypes.c_void_p * 3),
    )


class Td3Networks(ctypes.Structure):
    _fields_ = (
        ("actor", Network),
        ("target_actor", Network),
        ("critics", Network * 2),
        ("targets", Network * 2),
    )


class NativeTd3:
    """The updates of `learner`, in place of its `_step`; knows where its tensors are."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner
        self.places: tuple[int, ...] = ()
        self.networks = Td3Networks()
        self.norms: list[tuple[int, ...]] = []

    def __deepcopy__(self, memo: Any) -> NativeTd3:
        """A copy for the copied learner, whose tensors are elsewhere."""
        return NativeTd3(copy.deepcopy(self.learner, memo))

    @torch.no_grad()
    def __call__(self, follows: bool, act: bool, batch: Tensors) -> Tensors:
        """One update; what it trains besides the critics as in `Td3._step`."""
        optims = self.learner.optims
        self._find()
        inputs = self._table(batch)
        metrics = torch.empty(3)
        places = (native.address(inputs[key]) for key in TD3_INPUTS)
        native.load(TD3).td3_update(
            ctypes.byref(self._settings(inputs["action"], follows, act)),
            ctypes.byref(Td3Table(*places, *self.norms)),
            ctypes.byref(self.networks),
            ctypes.c_void_p(metrics.data_ptr()),
        )
        optims["critic"].advance(1)
        if act:
            optims["actor"].advance(1)
        names = ("critic_loss", "q_mean", "actor_loss")[: 3 if act else 2]
        return dict(zip(names, metrics.unbind(), strict=False))

    def _find(self) -> None:
        """Look where the tensors are, if they are not where they were."""
        learner = self.learner
        optims = learner.optims.values()
        for adam in optims:
            adam.prepare()
        pairs = [pair for adam in optims for _, pair in adam.moments()]
        tensors = [moment for pair in pairs for moment in pair]  # a loaded state replaces them
        tensors += [*learner.critic_params, *learner.actor_params]
        tensors += [*learner.target_params, *learner.target_actor_params]
        places = tuple(tensor.data_ptr() for tensor in tensors)
        if places == self.places:
            return
        self.places = places
        known = moments(optims)
        self.networks = Td3Networks(
            network(learner.policy.net, known, TD3_OPTIMIZERS.index("actor")),
            network(learner.target_policy.net, {}, 0),
            tuple(members(learner.critic.ensemble, known, TD3_OPTIMIZERS.index("critic"))),
            tuple(members(learner.target.ensemble, {}, 0)),
        )
        self.norms = [norm_places(part.encoder) for part in (learner.policy, learner.critic)]

    def _settings(self, action: Tensor, follows: bool, acts: bool) -> Td3Settings:
        adams = [self.learner.optims[name] for name in TD3_OPTIMIZERS]
        groups = [adam.param_groups[0] for adam in adams]
        betas = [(*group["betas"], group["eps"], group["weight_decay"]) for group in groups]
        return Td3Settings(
            tuple(value for each in betas for value in each),
            tuple(group["lr"] for group in groups),
            tuple(adam.count for adam in adams),
            self.learner.config.tau,
            *(*action.shape, self.learner.policy.squashes, follows, acts),
        )

    def _table(self, batch: Tensors) -> Tensors:
        """The inputs of an update [n, ...], one row per transition."""
        inputs: Tensors = {key: batch[key] for key in ("action", "reward", "discount")}
        inputs["noise"] = self.learner.target_noise(batch["action"])
        parts = {"actor": self.learner.policy.encoder, "critic": self.learner.critic.encoder}
        for prefix, name in (("", "obs"), ("next_", "next_obs")):
            obs = under(batch, name)
            for part, encoder in parts.items():
                features = encoder.flat if is_vectors(encoder) else encoder
                inputs[f"{prefix}{part}_input"] = features(obs)
        return {key: leaf.contiguous() for key, leaf in inputs.items()}


def is_vectors(encoder: Encoder) -> bool:
    """Whether it only normalizes vectors, which native code does too."""
    return not (encoder.images or encoder.sets or encoder.symbols is not None)


def norm_places(encoder: Encoder) -> tuple[int, ...]:
    """The addresses of the encoder's normaliser; none where `_table` has normalised."""
    if not is_vectors(encoder):
        return ()
    norm = encoder.norm
    return tuple(native.address(x) for x in (norm.mean, norm.std, norm.limit))
