"""Prompt-DT and Meta-DT: prompts by hand, acting as in training, lifetimes as data, resuming."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.checks.check import Check
from embodied.checks.policy import CHECKS, PolicySubject, the_noise_decides
from embodied.core.build import ConfigError
from embodied.core.errors import NotApplicable
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, each
from embodied.datasets.collect import CollectConfig, collect
from embodied.envs.toy.point import Config as PointConfig
from embodied.envs.toy.point import Point
from embodied.learners.offline.meta_dt import MetaDtLearner
from tests.builders import make_learner, make_policy, node_of
from tests.training.test_train import resumed, settings

SPEC = Spec(
    {
        "state": Leaf((2,)),
        "last_action": Leaf((1,), low=-1.0, high=1.0),
        "last_reward": Leaf((1,)),
        "first": Leaf((1,), low=0.0, high=1.0),
    },
    Leaf((1,), low=-1.0, high=1.0),
    dt=0.1,
)
SMALL = {"width": 8, "layers": 2, "prompt": 2, "best": 2, "window": 30}
LENGTHS = (5, 6, 4, 5, 7, 3)  # of inner episodes, three of each of two lifetimes
KINDS = ("prompt_dt", "meta_dt")
# The noise of a decision draws what is shown in later ones.
POLICY_CHECKS = [check for check in CHECKS if check is not the_noise_decides]


def dt(kind: str = "prompt_dt", **more: Any) -> Any:
    of_kind = {"latent": 3, "memory": 8, "history": 2} if kind == "meta_dt" else {}
    name = {"prompt_dt": "PromptDt", "meta_dt": "MetaDt"}[kind]
    return make_policy(f"{kind}.{name}", SPEC, **SMALL, **of_kind, **more)


def lifetimes(seed: int = 0) -> Tensors:
    """Transitions of the inner episodes of LENGTHS."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    first = torch.zeros(total, 1)
    first[starts] = 1
    action = torch.rand(total, 1, generator=generator) * 2 - 1
    reward = torch.randn(total, generator=generator)
    before = torch.cat([torch.zeros(1, 1), action[:-1]])
    paid = torch.cat([torch.zeros(1), reward[:-1]])[:, None]
    half = sum(LENGTHS[:3])
    before[half] = paid[half] = 0
    return {
        "obs/state": torch.randn(total, 2, generator=generator),
        **{"obs/last_action": before, "obs/last_reward": paid, "obs/first": first},
        **{"action": action, "reward": reward, "discount": torch.ones(total)},
        "episode": (torch.arange(total) >= half).long(),
        "place": torch.arange(total),
    }


def learner(kind: str = "prompt_dt", **config: Any) -> Any:
    name = {"prompt_dt": "PromptDtLearner", "meta_dt": "MetaDtLearner"}[kind]
    if kind == "meta_dt":
        config = {"context_updates": 2, **config}
    sizes = {"batch_size": 16, "length": 4, "best": 2}
    made = make_learner(f"offline.{kind}.{name}", dt(kind), **{**sizes, **config})
    made.fit(lifetimes())
    return made


def observed(rows: Tensors, at: int) -> Tensors:
    return {key[4:]: leaf[at : at + 1] for key, leaf in rows.items() if key.startswith("obs/")}


def lived(policy: Any, rows: Tensors, steps: range, carry: Tensors | None = None) -> Any:
    """Actions [T, A] at the recorded observations, and the carry after them."""
    carry = policy.initial(1) if carry is None else carry
    actions: list[Tensor] = []
    for at in steps:
        noise = torch.full((1, 1), (at * 37 % 19) / 19)
        action, carry = policy.act(observed(rows, at), carry, noise)
        actions.append(action[0, 0])
    return torch.stack(actions), carry


def test_an_episode_that_is_over_leaves_its_best_segment_with_returns_to_come() -> None:
    policy, rows = dt(), lifetimes()
    carry = lived(policy, rows, range(LENGTHS[0] + 1))[1]
    lots = [(at * 37 % 19) / 19 for at in range(1, LENGTHS[0])]  # drawn when a step is seen to end
    sums = [a + b for a, b in pairwise(lots)]
    begin = sums.index(max(sums))
    reward = rows["reward"][: LENGTHS[0]]
    assert carry["returns"][0, 0].item() == pytest.approx(reward.sum().item(), rel=1e-5)
    assert carry["returns"][0, 1] == -torch.inf
    segment = carry["prompts"][0, 0]
    to_come = reward.flip(0).cumsum(0).flip(0)[begin : begin + 2]
    torch.testing.assert_close(segment[:, 0], to_come)
    torch.testing.assert_close(segment[:, 2], reward[begin : begin + 2])
    torch.testing.assert_close(segment[:, 3:5], rows["obs/state"][begin : begin + 2])
    torch.testing.assert_close(segment[:, 5:], rows["action"][begin : begin + 2])
    assert carry["steps"][0] == 0 and carry["earned"][0] == 0, "a new episode"


def test_the_best_episodes_are_kept() -> None:
    policy = dt()
    carry = policy.initial(1) | {"score": torch.ones(1), "started": torch.ones(1).bool()}
    over, segment = torch.ones(1).bool(), carry["segment"]
    for number, earned in enumerate((1.0, 3.0, 0.0, 2.0)):
        given = carry | {"segment": segment + number, "score": torch.tensor([1.0 + number])}
        carry = carry | policy.stored(given, torch.tensor([earned]), over)
    assert carry["returns"].tolist() == [[2.0, 3.0]] and carry["scores"].tolist() == [[4.0, 2.0]]
    unseen = policy.stored(carry | {"score": torch.tensor([-torch.inf])}, torch.tensor([9.0]), over)
    assert unseen["returns"].tolist() == [[2.0, 3.0]], "an episode shorter than a prompt"


@pytest.mark.parametrize("kind", KINDS)
def test_acting_with_the_cache_is_the_sequence_of_training(kind: str) -> None:
    """The second episode of the recorded lifetime, after a prompt from the first one; and the first
    one, after none."""
    made = learner(kind)
    policy, rows, known = made.policy, lifetimes(), made.lifetimes
    policy.target.fill_(2.5)
    if kind == "meta_dt":
        made._use_context()
    carry = None
    for at, length in zip(known.start.tolist()[:2], LENGTHS, strict=False):
        index = torch.arange(at, at + length)
        acted, carry = lived(policy, rows, range(at, at + length), carry)
        reward = rows["reward"][index]
        wanted = 2.5 - (reward.cumsum(0) - reward)
        steps = {key: leaf[index][None] for key, leaf in known.steps.items()}
        seen = made.described(known.steps["state"][index], index)[None]
        tokens = policy.tokens(steps["before"], wanted[None], seen)
        shown = carry["prompts"][:, 0]
        prompt = torch.cat([shown[..., :1], shown[..., 3:]], 2)
        there = torch.tensor([at > 0])
        along = policy.along(prompt, there, tokens)[0]
        torch.testing.assert_close(acted, along, atol=1e-5, rtol=1e-4)
        changed = policy.along(prompt + 1, there, tokens)[0]
        assert torch.equal(changed, along) == (at == 0), (
            "a prompt that is not there changes nothing"
        )
        moved = tokens.clone()
        moved[:, 9:] += torch.randn(tokens.shape[2])
        later = policy.along(prompt, there, moved)[0]
        torch.testing.assert_close(later[:3], along[:3])
        assert not torch.allclose(later[3:], along[3:]), "only what comes later"


def test_the_data_are_read_as_inner_episodes() -> None:
    known, rows = learner().lifetimes, lifetimes()
    assert known.length.tolist() == [*LENGTHS] and known.start.tolist() == [0, 5, 11, 15, 20, 27]
    parts = rows["reward"].split(LENGTHS)
    torch.testing.assert_close(known.returns, torch.stack([part.sum() for part in parts]))
    to_come = torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])
    torch.testing.assert_close(known.steps["wanted"], to_come)
    assert not known.steps["before"][known.start].any(), "the last action is of another episode"
    for number, ranked in enumerate(known.ranked.tolist()):
        mine = range(3) if number < 3 else range(3, 6)
        assert ranked == sorted(mine, key=lambda e: -float(known.returns[e]))


def test_prompts_are_of_other_episodes_of_the_same_lifetime() -> None:
    made = learner(promptless=0.25)
    torch.manual_seed(0)
    own = torch.arange(6).repeat(400)
    prompt, there = made.prompts(own)
    known = made.lifetimes
    places = (prompt[:, 0, 1:3][:, None] - known.steps["state"]).abs().sum(2).argmin(1)
    of = known.number[places][there]
    assert ((of // 3) == (own[there] // 3)).all() and (of != own[there]).all()
    assert 0.7 < there.float().mean() < 0.8
    best = known.ranked[own[there]]
    assert (
        (of == best[:, 0]) | (of == best[:, 1]) | (own[there][:, None] == best[:, :2]).any(1)
    ).all()


def test_padding_has_no_gradient_and_the_loss_is_a_mean_of_steps() -> None:
    made = learner(promptless=1.0)
    last = made.lifetimes.end - 1
    state = made.lifetimes.steps["state"].requires_grad_(True)
    loss = made.loss(last)
    (slope,) = torch.autograd.grad(loss, [state])
    used = slope.abs().sum(1).nonzero().flatten()
    assert used.tolist() == last.tolist(), "sequences of one step, for which the rest is padding"
    single = torch.stack([made.loss(last[[number]]) for number in range(6)])
    torch.testing.assert_close(loss, single.mean())


def test_the_policy_shows_the_segment_that_the_learner_found_to_surprise_most() -> None:
    made = learner("meta_dt", context_updates=3)
    for _ in range(3):
        made.update({"place": torch.arange(30)})
    made._use_context()
    rows, known = lifetimes(), made.lifetimes
    carry = lived(made.policy, rows, range(sum(LENGTHS[:3])))[1]
    for episode, slot in ((0, 0), (1, 1)):
        begin = int(made.surprising[episode])
        state = carry["prompts"][0, slot, :, 3:5]
        torch.testing.assert_close(state, known.steps["state"][begin : begin + 2])
        assert known.start[episode] <= begin < known.end[episode] - 2


def test_the_context_learns_first_and_stays() -> None:
    made: MetaDtLearner = learner("meta_dt", context_updates=60, context_lr=1e-2)
    everything = {"place": torch.arange(30)}
    first = float(made.update(everything)["loss"])
    head = made.policy.head.weight.clone()
    for _ in range(59):
        last = float(made.update(everything)["loss"])
    assert last < 0.7 * first and torch.equal(head, made.policy.head.weight)
    frozen = each(made.policy.context.state_dict(), torch.clone)
    made.update(everything)
    assert not torch.equal(head, made.policy.head.weight)
    after = made.policy.context.state_dict()
    assert all(torch.equal(frozen[key], after[key]) for key in frozen)


def test_a_context_is_the_steps_before_of_the_same_episode() -> None:
    made = learner("meta_dt")
    place = torch.tensor([0, 1, 5, 8])
    z = made._latent(place)
    told = made._told(torch.arange(30))
    zero = torch.zeros(4)
    pairs = [torch.stack([zero, zero]), torch.stack([zero, told[0]]), torch.stack([zero, zero])]
    by_hand = torch.stack([*pairs, told[6:8]])
    torch.testing.assert_close(z, made.policy.context(by_hand))


def test_a_point_goes_where_it_is_sent() -> None:
    env = Point(PointConfig(num_envs=1, horizon=2, play=True))
    env.reset(0, task=torch.tensor([[0.25]]))  # the goal is (0, 1)
    env.place = torch.tensor([[0.0, 0.0]])
    step = env.step(torch.tensor([[1.0, 5.0]]))
    assert step.next_obs["state"].tolist() == [pytest.approx([0.1, 0.1])]
    assert step.reward.item() == pytest.approx(-((0.1**2 + 0.9**2) ** 0.5))
    assert step.next_obs["privileged/demonstrator"].tolist() == [pytest.approx([-1.0, 1.0])]
    env.place = torch.tensor([[0.1, 0.9]])
    step = env.step(torch.zeros(1, 2))
    assert step.log["success"].item() and step.truncated.item() and not step.terminated.item()


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind: str, tmp_path: Path) -> None:
    point = node_of("envs.toy.point.Point", num_envs=2, horizon=6)
    trials = {"_target_": "embodied.envs.wrappers.trials.Trials", "episodes": 3}
    env = node_of("envs.wrappers.stack.Wrapped", num_envs=2, env=point, wrappers=[trials])
    random = node_of("policies.random.Random")
    demos = str(tmp_path / "demos")
    collect(CollectConfig(env, random, 4, demos, 2, success_only=False), lambda kept, played: None)
    name = {"prompt_dt": "PromptDt", "meta_dt": "MetaDt"}[kind]
    node = settings(
        tmp_path / "run",
        "offline",
        env=env,
        demos=demos,
        policy=node_of(f"policies.{kind}.{name}", width=8, prompt=2),
        learner=node_of(
            f"learners.offline.{kind}.{name}Learner",
            **{"batch_size": 8, "length": 4},
            **({"context_updates": 2} if kind == "meta_dt" else {}),
        ),
        steps=8,
        log_every=4,
        eval={"episodes": 2, "num_envs": 2},
    )
    resumed(node, 5)


@pytest.mark.parametrize("check", POLICY_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_of_a_policy(kind: str, check: Check) -> None:
    name = {"prompt_dt": "PromptDt", "meta_dt": "MetaDt"}[kind]
    try:
        check(PolicySubject(node_of(f"policies.{kind}.{name}", width=8), SPEC))
    except NotApplicable as reason:
        pytest.skip(str(reason))


def test_refusals() -> None:
    plain = Spec({"state": Leaf((2,))}, SPEC.act, 0.1)
    with pytest.raises(ConfigError, match="Trials"):
        make_policy("prompt_dt.PromptDt", plain)
    choice = SPEC.with_act(Leaf((), "int64", 0, 3))
    with pytest.raises(ConfigError, match="continuous"):
        make_policy("prompt_dt.PromptDt", choice)
    with pytest.raises(ConfigError, match="policy=meta_dt"):
        make_learner("offline.meta_dt.MetaDtLearner", dt())
