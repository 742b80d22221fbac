"""Native code of PPO (on_policy/ppo.cpp), SAC and TD3 (off_policy/sac.cpp, td3.cpp): PyTorch spends
much of an update between the operations.

The references are `Ppo._step`, `Sac._step` and `Td3._step`. Parameters of PPO agree to 1e-5 after
300 updates; one update of SAC and TD3 from the same state agrees to 2e-5 along a training
(tests/learners/test_native.py). What native code does not support is trained by the reference.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.tensors import Tensors, under
from embodied.nn import native
from embodied.nn.native.networks import (
    Moments,
    Network,
    Parameter,
    activation_of,
    dense,
    members,
    moments,
    network,
    norm_places,
    parameter,
    plain,
    plain_members,
    transitions,
)

FOLDER = Path(__file__).parent
PPO = FOLDER / "on_policy" / "ppo.cpp"
PPO_METRICS = ("policy_loss", "value_loss", "entropy", "kl", "clipped", "grad_norm")
PPO_INPUTS = ("actor_input", "critic_input", "action", "old", "target", "advantage")
TD3 = FOLDER / "off_policy" / "td3.cpp"
TD3_METRICS = ("critic_loss", "q_mean", "actor_loss")
SAC = FOLDER / "off_policy" / "sac.cpp"
SAC_METRICS = ("critic_loss", "q_mean", "actor_loss", "entropy", "temperature")
INPUTS = (
    *("actor_input", "critic_input", "next_actor_input", "next_critic_input"),
    *("action", "noise", "reward", "discount"),
)
OPTIMIZERS = ("critic", "actor", "temperature")
"""By their places in native code, and in `rate` of parameters."""
KINDS = {
    "Ppo": ("embodied.policies.diagonal_gaussian.DiagonalGaussian", PPO),
    "Sac": ("embodied.policies.gaussian.Gaussian", SAC),
    "Td3": ("embodied.policies.deterministic.Deterministic", TD3),
}
"""The policy and the source by the class of the learner; names, as a run needs one of them."""


def obstacle(learner: Any) -> str | None:
    """Why `learner`, of one of KINDS, cannot be trained by native code; None if it can."""
    policy, config = learner.policy, learner.config
    name = type(learner).__name__
    wanted, source = KINDS[name]
    ppo, kind = name == "Ppo", type(policy)
    if f"{kind.__module__}.{kind.__qualname__}" != wanted:
        return f"the policy is {kind.__name__}, not {wanted.rpartition('.')[2]}"
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
    if ppo and not (plain(policy.net) and plain(critic.net)):
        return "a network is not linear layers with tanh or ReLU"
    if not ppo and not (plain(policy.net, norms=True) and plain_members(critic.ensemble)):
        return "a network is not linear layers, LayerNorm, and tanh or ReLU"
    if not all(p.requires_grad for p in (*weights, *(critic.net if ppo else critic).parameters())):
        return "a network is not trained"
    if not ppo and critic.ensemble.active is not None:
        return "its active units are measured"
    if name == "Td3" and config.atoms:
        return "atoms is set"
    if name == "Sac" and config.extractor:
        return "the critics have an own encoder"
    try:
        native.load(source)
    except native.NativeError as error:
        return str(error)
    return None


def use(learner: Any) -> None:
    """Let native code do the updates of `learner`, in place of one of its methods."""
    name = type(learner).__name__
    if name == "Ppo":
        learner._epochs = partial(NativePpo, learner)
    else:
        learner._step = (NativeTd3 if name == "Td3" else NativeSac)(learner)


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


class NativeActorCritic:
    """The updates of `learner`, in place of its `_step`; knows where its tensors are."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner
        self.places: tuple[int, ...] = ()
        self.norms: list[tuple[int, ...]] = []

    def __deepcopy__(self, memo: Any) -> NativeActorCritic:
        """A copy for the copied learner, whose tensors are elsewhere."""
        return type(self)(copy.deepcopy(self.learner, memo))

    def find(self) -> None:
        """Look where the tensors are, if they are not where they were."""
        learner = self.learner
        optims = learner.optims.values()
        for adam in optims:
            adam.prepare()
        pairs = [pair for adam in optims for _, pair in adam.moments()]
        tensors = [moment for pair in pairs for moment in pair]  # a loaded state replaces them
        tensors += learner.parameters()
        places = tuple(tensor.data_ptr() for tensor in tensors)
        if places == self.places:
            return
        self.places = places
        self.norms = [norm_places(part.encoder) for part in (learner.policy, learner.critic)]
        self.build(moments(optims))

    def build(self, known: Moments) -> None:
        """Describe the networks, whose moments are `known`."""
        raise NotImplementedError

    def ensembles(self, known: Moments) -> tuple[list[Network], list[Network]]:
        """The critics and their targets."""
        critics = members(self.learner.critic.ensemble, known, OPTIMIZERS.index("critic"))
        return critics, members(self.learner.target.ensemble, {}, 0)

    def adams(self) -> list[tuple[float, ...]]:
        """Of all optimisers: their settings side by side, rates, and steps made."""
        adams = [self.learner.optims[name] for name in OPTIMIZERS if name in self.learner.optims]
        groups = [adam.param_groups[0] for adam in adams]
        betas = [(*group["betas"], group["eps"], group["weight_decay"]) for group in groups]
        return [
            tuple(value for each in betas for value in each),
            tuple(group["lr"] for group in groups),
            tuple(adam.count for adam in adams),
        ]


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
        *((name, ctypes.c_void_p) for name in INPUTS),
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


class NativeTd3(NativeActorCritic):
    """The updates of TD3."""

    networks: Td3Networks

    @torch.no_grad()
    def __call__(self, follows: bool, act: bool, batch: Tensors) -> Tensors:
        """One update; what it trains besides the critics as in `Td3._step`."""
        learner = self.learner
        self.find()
        inputs = transitions(learner.policy, learner.critic, batch)
        inputs |= {"noise": learner.target_noise(batch["action"]).contiguous()}
        metrics = torch.empty(len(TD3_METRICS))
        places = (native.address(inputs[key]) for key in INPUTS)
        native.load(TD3).td3_update(
            ctypes.byref(self._settings(inputs["action"], follows, act)),
            ctypes.byref(Td3Table(*places, *self.norms)),
            ctypes.byref(self.networks),
            ctypes.c_void_p(metrics.data_ptr()),
        )
        learner.optims["critic"].advance(1)
        if act:
            learner.optims["actor"].advance(1)
        return dict(zip(TD3_METRICS[: 3 if act else 2], metrics.unbind(), strict=False))

    def build(self, known: Moments) -> None:
        learner = self.learner
        critics, targets = self.ensembles(known)
        self.networks = Td3Networks(
            network(learner.policy.net, known, OPTIMIZERS.index("actor")),
            network(learner.target_policy.net, {}, 0),
            *(tuple(critics), tuple(targets)),
        )

    def _settings(self, action: Tensor, follows: bool, acts: bool) -> Td3Settings:
        learner = self.learner
        flags = (learner.policy.squashes, follows, acts)
        return Td3Settings(*self.adams(), learner.config.tau, *action.shape, *flags)


class SacSettings(ctypes.Structure):
    _fields_ = (
        ("adam", ctypes.c_double * 12),
        ("rates", ctypes.c_double * 3),
        ("steps", ctypes.c_double * 3),
        *((name, ctypes.c_double) for name in ("tau", "low", "high", "entropy")),
        *((name, ctypes.c_int64) for name in ("size", "slices", "played", "subset")),
        *((name, ctypes.c_int64) for name in ("soft", "squashes", "entropic", "mean", "acts")),
    )


class SacTable(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*INPUTS, "next_noise", "chosen")),
        ("actor", ctypes.c_void_p * 3),
        ("critic", ctypes.c_void_p * 3),
    )


class SacNetworks(ctypes.Structure):
    _fields_ = (
        ("actor", Network),
        ("critics", ctypes.POINTER(Network)),
        ("targets", ctypes.POINTER(Network)),
        ("members", ctypes.c_int64),
        ("log_alpha", Parameter),
    )


class NativeSac(NativeActorCritic):
    """The updates of SAC, REDQ and RLPD; networks and space are kept between them in `work`."""

    networks: SacNetworks
    work: ctypes.c_void_p
    end: weakref.finalize[Any, NativeSac] | None = None

    @torch.no_grad()
    def __call__(self, act: bool, batch: Tensors) -> Tensors:
        """One update; `act`: with a step of policy and temperature, as in `Sac._step`."""
        learner = self.learner
        if "weight" in batch:  # prioritised sampling wants each error
            with torch.enable_grad():
                return type(learner)._step(learner, act, batch)
        self.find()
        inputs = self._table(batch, act)
        metrics = torch.empty(len(SAC_METRICS))
        places = {key: native.address(leaf) for key, leaf in inputs.items()}
        native.load(SAC).sac_update(
            self.work,
            ctypes.byref(self._settings(len(batch["reward"]), act)),
            ctypes.byref(SacTable(actor=self.norms[0], critic=self.norms[1], **places)),
            ctypes.byref(self.networks),
            ctypes.c_void_p(metrics.data_ptr()),
        )
        learner.optims["critic"].advance(learner.config.utd)
        if act:
            learner.optims["actor"].advance(1)
            learner.optims["temperature"].advance(1)
        return dict(zip(SAC_METRICS[: 5 if act else 2], metrics.unbind(), strict=False))

    def build(self, known: Moments) -> None:
        learner = self.learner
        critics, targets = self.ensembles(known)
        self.networks = SacNetworks(
            network(learner.policy.net, known, OPTIMIZERS.index("actor")),
            (Network * len(critics))(*critics),
            (Network * len(targets))(*targets),
            len(critics),
            parameter(learner.log_alpha, known, OPTIMIZERS.index("temperature")),
        )
        code = native.load(SAC)
        code.sac_begin.restype = ctypes.c_void_p
        if self.end is not None:
            self.end()
        begun = code.sac_begin(ctypes.byref(self.networks), learner.policy.size)
        self.work = ctypes.c_void_p(begun)
        self.end = weakref.finalize(self, code.sac_end, self.work)

    def _settings(self, rows: int, acts: bool) -> SacSettings:
        learner = self.learner
        policy, config = learner.policy, learner.config
        return SacSettings(
            *self.adams(),
            *(config.tau, *policy.config.log_std, learner.entropy),
            *(rows // config.utd, config.utd, policy.size, config.subset),
            *(policy.config.soft, policy.squashes, config.entropy_in_backup),
            *(config.actor_objective == "mean", acts),
        )

    def _table(self, batch: Tensors, acts: bool) -> Tensors:
        """The inputs of an update [n, ...], one row per transition, and what the reference draws,
        in its order: for each slice noise and critics, then noise for the policy's step."""
        policy, config = self.learner.policy, self.learner.config
        inputs = transitions(policy, self.learner.critic, batch)
        size = len(batch["reward"]) // config.utd
        noise: list[Tensor] = []
        chosen: list[Tensor] = []
        for _ in range(config.utd):
            noise.append(policy.sample_noise(size, True))
            critics = torch.arange(config.critics)
            if config.subset < config.critics:
                critics = torch.rand(config.critics).topk(config.subset).indices
            chosen.append(critics)
        drawn = {"next_noise": torch.cat(noise), "chosen": torch.cat(chosen)}
        return {**inputs, **drawn, "noise": policy.sample_noise(size, True) if acts else noise[0]}
