"""Checks of a learner: its metrics, what an update changes, seeds, exact resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from embodied.checks.check import checks_of, from_file, require
from embodied.core.build import ConfigError, Node, build, kind_of
from embodied.core.config_fields import complete
from embodied.core.env import REAL
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.reward import extra_columns
from embodied.core.spec import BEST_ACTION, SYMBOL, Leaf, Spec
from embodied.core.tensors import Tensors, each, nest, under
from embodied.learners.learner import Learner, RunPlan

SPEC = Spec({"state": Leaf((3,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)
CHOICE = SPEC.with_act(Leaf((), "int64", 0, 3)).with_obs(
    **{BEST_ACTION: Leaf((1,), "int64", 0, 3, SYMBOL)}
)  # for learners of discrete actions only
ROWS = 8  # transitions of one gradient step
HORIZON = 6  # decisions of an on-policy batch, of each of 4 parallel envs
EPOCHS = 2  # passes over such a batch
BASE = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 2, "width": 16}
DIFFUSION = BASE | {"_target_": "embodied.policies.generative.diffusion.Diffusion"}


@dataclass(frozen=True)
class LearnerSubject:
    """The node of a learner, and the policies and fine-tuners that it is tried with, in order.

    With each fine-tuner: the policy that it trains in place of its base (None: it takes none).
    """

    node: Node
    policies: Sequence[Node]
    finetunes: Sequence[tuple[Node, Node | None]] = ()


def make(subject: LearnerSubject, seed: int = 0) -> Learner:
    """The learner with the first policy that it accepts; ConfigError with the last reason."""
    settings = complete(subject.node)
    sizes = {"batch_size": ROWS, "horizon": HORIZON, "epochs": EPOCHS}
    settings |= {key: size for key, size in sizes.items() if key in settings}
    tries: list[Callable[[], Policy]] = [
        *(lambda node=node: build(node, Policy, spec=SPEC) for node in subject.policies),
        *(lambda pair=pair: trainable(*pair) for pair in subject.finetunes),
        *(lambda node=node: build(node, Policy, spec=CHOICE) for node in subject.policies),
    ]
    reason = "there is no policy"
    for make_policy in tries:
        torch.manual_seed(seed)
        try:
            policy = make_policy()
            spec = SPEC if policy.spec.act.is_continuous else CHOICE
            learner = build(settings, Learner, policy=policy, spec=spec, run=RunPlan(updates=100))
        except ConfigError as error:
            reason = str(error)
            continue
        if learner.data == "offline" and learner.rows != "pairs":
            learner.fit(batch_for(learner))
        return learner
    raise ConfigError(f"it takes none of the policies (policy=NAME chooses one): {reason}")


def trainable(node: Node, inner: Node | None) -> Policy:
    """What a learner gets of a fine-tuner around a small flow or diffusion policy."""
    base = build(DIFFUSION if "Diffusion" in node["_target_"] else BASE, Policy, spec=SPEC)
    return kind_of(node, PolicyWrapper).wrap(base, node, inner).trainable()


def batch_for(learner: Learner, seed: int = 0) -> Tensors:
    """A batch of the kind that its training regime gives it."""
    n, generator = learner.batch_size, torch.Generator().manual_seed(seed)
    states = torch.randn(2, n, 3, generator=generator)
    if learner.data == "on_policy":
        return segment(learner, generator)
    if learner.rows == "chunks":
        steps = learner.policy.chunk
        action = torch.rand(n, steps, 2, generator=generator) * 2 - 1
        valid = torch.ones(n, steps, dtype=torch.bool)
        return {"obs/state": states[0], "action": action, "valid": valid}
    if learner.rows == "pairs":
        shape = n, 2, learner.segment
        return {
            "obs/state": torch.randn(*shape, 3, generator=generator),
            "action": torch.rand(*shape, 2, generator=generator) * 2 - 1,
            "label": torch.randint(3, (n,), generator=generator) / 2,
        }
    rows = {
        "obs/state": states[0],
        "action": torch.rand(n, 2 * learner.policy.chunk, generator=generator) * 2 - 1,
        "reward": torch.randn(n, generator=generator),
        "discount": 0.99 * (torch.rand(n, generator=generator) > 0.1),
        "next_obs/state": states[1],
        "violated": torch.rand(n, generator=generator) < 0.2,
    }
    foreseen = {
        "next_action": torch.rand(n, 2 * learner.policy.chunk, generator=generator) * 2 - 1,
        "returns": torch.randn(n, generator=generator),
    }
    if learner.uses_executed_steps:
        rows["executed_steps"] = torch.full((n,), learner.policy.chunk)
    numbers = torch.arange(n)
    placed = {"source": numbers % 2, REAL: numbers % 2 == 0}
    placed |= {"episode": numbers % 3, "correction": numbers % 4 == 0}
    rows |= {key: placed[key] for key in extra_columns(learner) if key in placed}
    return rows | {key: foreseen[key] for key in learner.columns}


def segment(learner: Learner, generator: torch.Generator, rows: int = 4) -> Tensors:
    """Decisions of the policy itself, in the order of time, as in on-policy training."""
    policy, times = learner.policy, (HORIZON, rows)
    states = torch.randn(*times, 2, 3, generator=generator)
    with torch.no_grad():
        obs = {"state": states[:, :, 0].flatten(0, 1)}
        noise = policy.sample_noise(HORIZON * rows, True)
        plan, carry = policy.act(*policy.observe(obs, policy.initial(len(noise)), noise), noise)
    stored = plan.flatten(1) if plan.ndim > 2 else plan.squeeze(1)
    kept = {"action": stored, **under(carry, "row")}
    seen = {"state": states}
    if BEST_ACTION in policy.spec.obs:
        seen[BEST_ACTION] = torch.randint(4, (*times, 2, 1), generator=generator)
    ended = torch.rand(times, generator=generator) < 0.2
    over = ended & (torch.rand(times, generator=generator) < 0.5)
    first = torch.cat([torch.ones(1, rows, dtype=torch.bool), ended[:-1]])
    return {
        **nest(each(seen, lambda leaf: leaf[:, :, 0]), "obs"),
        **nest(each(seen, lambda leaf: leaf[:, :, 1]), "next_obs"),
        **{key: value.unflatten(0, times) for key, value in kept.items()},
        "reward": torch.randn(times, generator=generator),
        "discount": 0.99 * ~over,
        "ended": ended,
        "first": first,
        "valid": torch.ones(times, dtype=torch.bool),
        **nest(policy.initial(rows), "carry"),
    }


def updates(learner: Learner, first: int, last: int) -> None:
    """The updates number `first` to `last`, each with its own batch and seed."""
    for seed in range(first, last):
        torch.manual_seed(seed)
        learner.update(batch_for(learner, seed))


def weights(learner: Learner) -> Tensors:
    return each(learner.state_dict(), torch.clone)


def same(one: Tensors, other: Tensors) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def it_can_be_built(subject: LearnerSubject) -> None:
    """It can be built with a policy, and declares its training regime."""
    learner = make(subject)
    regimes = ("offline", "off_policy", "on_policy")
    data: Any = getattr(learner, "data", None)
    require(data in regimes, f"data={data!r} should be one of {', '.join(regimes)}")
    whole = learner.batch_size % ROWS == 0
    require(whole, f"batch_size={ROWS} was set, and learner.batch_size is {learner.batch_size}")


def metrics_are_finite_scalars(subject: LearnerSubject) -> None:
    """update returns finite, detached 0-d tensors by name."""
    learner = make(subject)
    metrics = learner.update(batch_for(learner))
    require(metrics, "update returns no metrics: the loss at least")
    for key, value in metrics.items():
        require(isinstance(value, torch.Tensor), f"metric {key} should be a tensor, not a number")
        require(value.ndim == 0, f"metric {key} is {list(value.shape)}: write .mean()")
        require(not value.requires_grad, f"metric {key} has gradients: write .detach()")
        require(torch.isfinite(value), f"metric {key} is {float(value)}")


def updates_change_the_policy_and_not_the_batch(subject: LearnerSubject) -> None:
    """update changes the policy's parameters, and leaves the batch as it was."""
    learner = make(subject)
    before, batch = each(learner.policy.state_dict(), torch.clone), batch_for(learner)
    kept = each(batch, torch.clone)
    learner.update(batch)
    learner.update(batch)
    after = dict(learner.policy.state_dict())
    require(not same(before, after), "update does not change the policy")
    require(same(batch, kept), "update changes the batch: others read it too")


def the_seed_decides(subject: LearnerSubject) -> None:
    """The same seed gives the same parameters, another one others."""
    one, other, third = make(subject), make(subject), make(subject, seed=1)
    for learner, last in ((one, 4), (other, 4), (third, 1)):
        updates(learner, 0, last)
    require(
        same(weights(one), weights(other)),
        "the same seed gives other parameters: take random numbers from torch's generator only",
    )
    require(not same(weights(one), weights(third)), "the seed changes nothing")


def it_resumes_exactly(subject: LearnerSubject) -> None:
    """After get_state and set_state, in a learner of another seed, updates are the same."""
    whole = make(subject)
    updates(whole, 0, 3)
    state = from_file(whole.get_state())
    updates(whole, 3, 6)
    other = make(subject, seed=1)
    updates(other, 7, 8)
    other.set_state(state)
    updates(other, 3, 6)
    require(
        same(weights(whole), weights(other)),
        "it does not resume exactly: name all optimizers in optimizers(), and register what "
        "changes as parameters or buffers",
    )


def a_copy_learns_on_its_own(subject: LearnerSubject) -> None:
    """A deep copy learns without changing the original."""
    learner = make(subject)
    updates(learner, 0, 1)
    other, before = copy.deepcopy(learner), weights(learner)
    updates(other, 1, 2)
    require(same(before, weights(learner)), "a copy's update changes the original")
    require(not same(before, weights(other)), "a copy does not learn")


def unknown_settings_are_refused(subject: LearnerSubject) -> None:
    """A setting that it does not have is refused in one line."""
    try:
        make(LearnerSubject(subject.node | {"no_such_setting": 4}, subject.policies))
    except ConfigError:
        return
    except TypeError:
        pass
    require(False, "it takes settings that it does not know: __init__(self, config: Config, ...)")


CHECKS = checks_of(__name__)
