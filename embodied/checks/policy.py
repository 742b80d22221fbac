"""Checks of a policy: its actions, its noise, its memory of nothing else, saving, imitation."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.checks.check import checks_of, require, skip
from embodied.core import checkpoint
from embodied.core.build import ConfigError, Node, build
from embodied.core.choices import Choices
from embodied.core.policy import Policy
from embodied.core.spec import MASK, Leaf, Spec, hidden, mixed_leaf
from embodied.core.tensors import Tensors, each, nest
from embodied.nn.optim import Adam

ACT = Leaf((3,), low=-1.0, high=1.0)
CHOICE = Leaf((), "int64", 0, 3)
MIXED = mixed_leaf((3, 0, 2))  # two choices, and a number between them
STATE = Spec({"state": Leaf((5,))}, ACT, dt=0.05)
SPECS = {
    "state": STATE,
    "cameras": STATE.with_obs(
        **{"front": Leaf((24, 32, 3), "uint8"), "wrist": Leaf((16, 16, 3), "uint8")},
        **{"critic/contact": Leaf((2,)), "privileged/mass": Leaf((2,))},
    ),
    "symbols": STATE.with_obs(
        cells=Leaf((2, 2, 2), "uint8", 0, (4, 2) * 4, unit="symbol"),
        turn=Leaf((), "int64", 0, 3, unit="symbol"),
    ),
}
"""Observations and actions that a policy is checked with, where no environment is given."""


@dataclass(frozen=True)
class PolicySubject:
    """The node of a policy, and the observations and actions that it is built for."""

    node: Node
    spec: Spec


def fitted(subject: PolicySubject) -> Policy:
    """The policy, with normalizers fitted to made-up demonstrations, always the same."""
    torch.manual_seed(0)
    policy = built(subject.node, subject.spec)
    policy.fit(demonstrations(policy, 64))
    return policy.eval()


def built(node: Node, spec: Spec) -> Policy:
    """The policy for `spec`; one that refuses continuous actions gets discrete ones."""
    try:
        return build(node, Policy, spec=spec)
    except ConfigError:
        if spec.act.dtype != "int64":
            with suppress(ConfigError):
                return build(node, Policy, spec=spec.with_act(CHOICE))
        raise


def observations(spec: Spec, n: int) -> Tensors:
    """Random observations [n, ...]; unbounded ones are not centred at zero."""
    found: Tensors = {}
    for name, leaf in spec.obs.items():
        bounded = leaf.low is not None and leaf.high is not None
        if leaf.is_picture or leaf.is_symbol or leaf.is_text or bounded:
            found[name] = leaf.sample(n)
        else:
            found[name] = (3 * torch.randn(n, *leaf.shape) + 1).to(getattr(torch, leaf.dtype))
    return found


def demonstrations(policy: Policy, n: int) -> Tensors:
    """Actions that depend on the first observation; the end of some chunks is not valid."""
    obs = observations(policy.spec, n)
    first = next(value for value in obs.values() if value.is_floating_point() or value.ndim > 1)
    flat, act = first.flatten(1).float(), policy.spec.act
    if act.dtype == "int64":
        target = (flat.sum(1).abs() * 7).long() % act.choices[0]
    else:
        target = torch.tanh(flat.repeat(1, -(-act.size // flat.shape[1]))[:, : act.size])
        target = target.view(n, *act.shape)
    valid = torch.arange(policy.chunk) < torch.randint(1, policy.chunk + 1, (n, 1))
    action = target[:, None].expand(n, policy.chunk, *target.shape[1:]).contiguous()
    return {**nest(obs, "obs"), "action": action, "valid": valid}


@torch.no_grad()
def decide(policy: Policy, obs: Tensors, noise: Tensor) -> Tensor:
    """Actions [n, chunk, A] of one decision at the beginning of an episode."""
    seen, carry = policy.observe(obs, policy.initial(len(noise)), noise)
    return policy.act(seen, carry, noise)[0]


def response(policy: Policy, obs: Tensors, noise: Tensor) -> Tensor:
    """What the policy makes of observations: its actions, or where these are few, and so hide a
    small influence, the values of its first step's choices, or the loss (with memory, the density)
    of always choosing the first."""
    discrete = policy.spec.act.dtype == "int64"
    values: Any = getattr(policy, "values", None)
    if discrete and values is not None:
        return values(obs, torch.zeros(len(noise), dtype=torch.int64)).detach()
    evaluate_sequence: Any = getattr(policy, "evaluate_sequence", None)
    if discrete and evaluate_sequence is not None:
        n, rows = len(noise), each(obs, lambda leaf: leaf[None])
        first = torch.ones(1, n, dtype=torch.bool)
        return evaluate_sequence(rows, torch.zeros(1, n), policy.initial(n), first)[0].detach()
    if not discrete or type(policy).loss is Policy.loss:
        return decide(policy, obs, noise)
    shape = (len(noise), policy.chunk)
    valid = torch.ones(shape, dtype=torch.bool)
    action = torch.zeros(shape, dtype=torch.int64)
    return policy.loss({**nest(obs, "obs"), "action": action, "valid": valid}).detach()


def it_can_be_built(subject: PolicySubject) -> None:
    """It can be built for these observations and actions."""
    policy = built(subject.node, subject.spec)
    require(policy.chunk >= 1, f"chunk={policy.chunk} should be at least 1")


def actions_have_shape_and_range(subject: PolicySubject) -> None:
    """Actions are [n, chunk, A] in [-1, 1] (int64 [n, chunk] if discrete), and they do vary."""
    policy = fitted(subject)
    noise = 5 * policy.sample_noise(6, explore=True)
    actions, act = decide(policy, observations(policy.spec, 6), noise), policy.spec.act
    wanted = (6, policy.chunk, *act.shape)
    require(
        tuple(actions.shape) == wanted,
        f"act returns {list(actions.shape)}, should be {list(wanted)}: [n, chunk, *spec.act.shape]",
    )
    kind = str(actions.dtype).removeprefix("torch.")
    require(kind == act.dtype, f"act returns {kind}, should be {act.dtype}")
    if act.dtype == "int64":
        inside = actions.min() >= 0 and actions.max() < act.choices[0]
        require(inside, f"act returns choices outside 0 to {act.high}")
    else:
        largest = float(actions.abs().max())
        require(largest <= 1, f"act returns {largest:.3g}, outside [-1, 1]: clamp or tanh")
    require(actions.float().std() > 1e-3, "all actions are the same, whatever is observed")


def the_chunk_is_what_was_asked_for(subject: PolicySubject) -> None:
    """The setting `chunk`, where there is one, is the number of actions of a decision."""
    try:
        policy = built({**subject.node, "chunk": 3}, subject.spec)
    except (ConfigError, TypeError):
        skip("it has no setting chunk")
    shape = decide(policy, observations(policy.spec, 2), policy.sample_noise(2)).shape
    require(
        policy.chunk == shape[1] == 3,
        f"chunk=3, but policy.chunk is {policy.chunk} and act returns {shape[1]} actions",
    )


def the_noise_decides(subject: PolicySubject) -> None:
    """The same noise gives the same action; exploration varies it."""
    policy = fitted(subject)
    obs, noise = observations(policy.spec, 20), policy.sample_noise(20, explore=True)
    one = decide(policy, obs, noise)
    torch.manual_seed(1)
    require(
        torch.equal(one, decide(policy, obs, noise)),
        "act is random by itself: take all randomness from the argument `noise`",
    )
    other = decide(policy, obs, policy.sample_noise(20, explore=True))
    require(not torch.equal(one, other), "the noise of exploration changes no action")


def noise_comes_from_torchs_generator(subject: PolicySubject) -> None:
    """sample_noise takes [n, ...] from torch's default generator; without exploration it is the
    noise of the method, or zero."""
    policy = fitted(subject)
    torch.manual_seed(3)
    one = policy.sample_noise(5, explore=True)
    torch.manual_seed(3)
    two = policy.sample_noise(5, explore=True)
    require(len(one) == 5, f"sample_noise(5) returns {len(one)} rows")
    require(torch.equal(one, two), "sample_noise does not use torch's default generator")
    calm = policy.sample_noise(5, explore=False)
    require(
        not torch.equal(two, policy.sample_noise(5, explore=True)),
        "sample_noise is always the same",
    )
    require(calm.shape == one.shape, "sample_noise has another shape without exploration")
    own = not calm.any() or 0.3 < calm.std() < 3
    require(own, "without exploration, noise should be zeros, or of standard deviation near one")


def parallel_envs_are_independent(subject: PolicySubject) -> None:
    """A decision depends on its own observation only, not on the others of the batch."""
    policy = fitted(subject)
    obs, noise = observations(policy.spec, 3), policy.sample_noise(3, explore=True)
    together = decide(policy, obs, noise)
    for i in range(3):
        alone = decide(policy, {k: v[i : i + 1] for k, v in obs.items()}, noise[i : i + 1])
        near = torch.allclose(together[i : i + 1].float(), alone.float(), atol=1e-4, rtol=0)
        require(near, "an action changes with the other observations of the batch (batch norm?)")


def observations_matter(subject: PolicySubject) -> None:
    """Every observation has an influence, but those for critics only: it can do without them."""
    policy = fitted(subject)
    obs, noise = observations(policy.spec, 4), policy.sample_noise(4)
    before = response(policy, obs, noise)
    for name in obs:
        changed = {**obs, name: observations(policy.spec, 4)[name]}
        same, unseen = torch.equal(before, response(policy, changed, noise)), hidden(name)
        require(not unseen or same, f"obs/{name} is for critics only, and changes the actions")
        require(unseen or not same or policy.spec.obs[name].is_text, f"obs/{name} is ignored")
    without = {name: value for name, value in obs.items() if not hidden(name)}
    same = torch.equal(before, response(policy, without, noise))
    require(same, "it needs observations for critics only: obs/critic/*, obs/privileged/*")


def acting_leaves_no_gradients(subject: PolicySubject) -> None:
    """Deciding leaves no gradients."""
    policy = fitted(subject)
    actions = decide(policy, observations(policy.spec, 2), policy.sample_noise(2))
    clean = all(parameter.grad is None for parameter in policy.parameters())
    require(clean and not actions.requires_grad, "acting leaves gradients behind")


def a_saved_policy_acts_bit_for_bit(subject: PolicySubject) -> None:
    """Saved and loaded again, it acts the same bit for bit."""
    policy = fitted(subject)
    obs, noise = observations(policy.spec, 4), policy.sample_noise(4, explore=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "checkpoints" / "00000000", policy, 0)
        loaded = checkpoint.load_policy(Path(folder), policy.spec)
    require(
        torch.equal(decide(policy, obs, noise), decide(loaded, obs, noise)),
        "it acts otherwise after saving and loading: keep all that matters in parameters, in "
        "buffers (register_buffer) or in its config",
    )
    require(loaded.node == policy.node and loaded.spec == policy.spec, "its node or spec changes")


def imitation_makes_the_loss_fall(subject: PolicySubject) -> None:
    """Twenty updates make its imitation loss [n] fall (policies with `loss` only)."""
    policy = _imitating(subject).train()
    batch = demonstrations(policy, 64)
    adam = Adam(policy.parameters(), lr=1e-3, local=True)
    require(policy.loss(batch).shape == (64,), "loss should be one number per decision: [n]")
    before = _level(policy, batch)
    for _ in range(20):
        policy.loss(batch).mean().backward()
        adam.step()
    after = _level(policy, batch)
    require(after < 0.9 * before, f"the loss stays: {before:.3g} before, {after:.3g} after")


def _imitating(subject: PolicySubject) -> Policy:
    policy = fitted(subject)
    if type(policy).loss is Policy.loss:
        skip("it has no imitation loss")
    return policy


def _level(policy: Policy, batch: Tensors) -> float:
    torch.manual_seed(0)
    return float(sum(policy.loss(batch).mean().detach() for _ in range(4)))


def steps_that_are_not_valid_teach_nothing(subject: PolicySubject) -> None:
    """Actions where `valid` is false do not change the loss (policies with `loss` only)."""
    policy = _imitating(subject)
    batch, losses = demonstrations(policy, 8), list[Tensor]()
    valid = batch["valid"].view(8, policy.chunk, *[1] * len(policy.spec.act.shape))
    for filler in (0, 1) if policy.spec.act.dtype == "int64" else (0.0, 0.9):
        action = torch.where(valid, batch["action"], filler)
        torch.manual_seed(0)
        losses.append(policy.loss({**batch, "action": action}))
    # A network that sees the whole noisy chunk also sees its tail: only the error is masked.
    whole = batch["valid"].all(1)
    near = torch.allclose(losses[0][whole], losses[1][whole])
    require(near, "the loss of complete chunks depends on others that are not complete")
    none = {**batch, "valid": torch.zeros_like(batch["valid"])}
    require(torch.equal(policy.loss(none), torch.zeros(8)), "steps that are not valid have a loss")


def choices_are_refused_or_played(subject: PolicySubject) -> None:
    """For discrete actions, and for choices beside numbers, it raises ConfigError in one line, or
    acts: int64 [n, chunk], or [n, chunk, A]; never what a mask forbids."""
    for act in (CHOICE, MIXED):
        mask = Leaf((sum(act.choices),), low=0.0, high=1.0)
        for spec in (
            subject.spec.with_act(act),
            subject.spec.with_act(act).with_obs(**{MASK: mask}),
        ):
            try:
                policy = build({**subject.node}, Policy, spec=spec)
            except ConfigError as error:
                require("\n" not in str(error), "its refusal of choices has several lines")
                continue
            _require_choices(policy)


def _require_choices(policy: Policy) -> None:
    obs, act, choices = observations(policy.spec, 40), policy.spec.act, Choices(policy.spec)
    if MASK in obs:
        obs[MASK] = (obs[MASK] > 0.7).float()
        obs[MASK][:, choices.index[:, 0]] = 1.0  # one is always allowed
    actions = decide(policy, obs, policy.sample_noise(40, explore=True))
    shape, kind = list(actions.shape), str(actions.dtype).removeprefix("torch.")
    fine = shape == [40, policy.chunk, *act.shape] and kind == act.dtype
    require(fine, f"choices are {kind}{shape}, should be {act.dtype}[n, chunk, *spec.act.shape]")
    chosen, numbers = choices.split(actions)
    require(torch.equal(choices.join(chosen, numbers), actions), "a choice is not a whole number")
    inside = bool((chosen >= 0).all() and (chosen < choices.count).all())
    require(inside and bool((numbers.abs() <= 1).all()), "an action is outside its bounds")
    allowed = choices.allowed(obs).expand(40, policy.chunk, -1, -1)
    require(bool(allowed.gather(3, chosen[..., None]).all()), "it chooses what the mask forbids")


def it_stays_on_the_device(subject: PolicySubject) -> None:
    """Deciding and its loss use tensors of its own device only, and look at no value there."""
    policy = fitted(subject)  # the meta device refuses both
    batch = demonstrations(policy, 4)
    policy.to("meta")
    obs = each(observations(policy.spec, 4), lambda value: value.to("meta"))
    try:
        noise = policy.sample_noise(4, explore=True)
        on_device = noise.is_meta and decide(policy, obs, noise).is_meta
        if type(policy).loss is not Policy.loss:
            on_device &= policy.loss(each(batch, lambda value: value.to("meta"))).is_meta
    except (RuntimeError, NotImplementedError) as error:
        require(False, f"it would not run on a GPU: {' '.join(str(error).split())[:200]}")
    else:
        require(on_device, "it makes tensors on the CPU: give device=noise.device")


CHECKS = checks_of(__name__)
