"""EXPO, DSRL-NA: targets, losses and problems; searched noise: the vector that succeeds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.actor import Actor
from embodied.core.build import ConfigError, allow, build, resolve
from embodied.core.env import Step
from embodied.core.policy import Policy, PolicyWrapper
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.evaluation.evaluate import evaluate
from embodied.export.decision import Decision
from embodied.learners.finetune.dsrl_na import DsrlNa
from embodied.learners.finetune.expo import Expo
from embodied.learners.finetune.ticket import posterior, principal
from embodied.learners.learner import RunPlan
from embodied.policies.steering import dsrl_na
from embodied.policies.steering.ticket import Ticket
from tests.builders import LINE, make_learner, make_policy, node_of, run_folder, still
from tests.learners.parts import copies, moved, require_average, slopes
from tests.toy_envs import Reach
from tests.training.test_train import resumed, run, settings

FLOW = node_of("policies.generative.flow.Flow", width=16, depth=1)
EDIT = node_of("policies.gaussian.Gaussian", hidden=[16])


def make(
    chunk: int = 1,
    n: int = 3,
    critics: int = 2,
    hidden: tuple[int, ...] = (16,),
    scale: float = 0.2,
    **settings: Any,
) -> Expo:
    critic = node_of("learners.critics.Critic", n=critics, hidden=list(hidden))
    parts = {"base": FLOW, "edit": EDIT, "critic": critic}
    policy = make_policy("wrappers.edit.Edit", LINE, chunk=chunk, n=n, scale=scale, **parts)
    return make_learner("finetune.expo.Expo", policy, **{"batch_size": 16, **settings})


def rows(n: int) -> Tensors:
    """Actions around 0; the world ends, and pays up to 1 at 0.4."""
    action = 0.15 * torch.randn(n, 1)
    zeros = torch.zeros(n, 1)
    return still(zeros, action, 1 - (action[:, 0] - 0.4).square())


def test_the_on_the_fly_target_by_hand() -> None:
    """Both critics in the subset: the argmax over base and edits of min(a, 3 a), and its value."""
    learner = make(hidden=(), n=4)
    torch.nn.init.normal_(learner.online.edit.net[-1].weight, std=3.0)
    slopes(learner.target, [1.0, 3.0])
    slopes(learner.critic, [-1.0, -1.0])  # the learning critics have no say in the target
    following, reward = {"state": torch.randn(8, 1)}, torch.arange(8.0)
    discount = torch.tensor([0.9] * 4 + [0.81] * 3 + [0.0])
    torch.manual_seed(4)
    best = learner.online.proposals(following, learner.online.sample_noise(8, True))[..., 0].amax(1)
    torch.manual_seed(4)
    backup = learner._backup(reward, discount, following)
    torch.testing.assert_close(backup, reward + discount * torch.minimum(best, 3 * best))


def test_the_base_that_learns_proposes_for_the_target() -> None:
    learner = make(hidden=(), n=4)
    slopes(learner.target, [1.0, 1.0])
    following, one = {"state": torch.randn(8, 1)}, torch.ones(8)
    backups = []
    for change in (None, learner.policy.base, learner.online.base):
        if change is not None:
            torch.nn.init.normal_(change.net.leave.weight)
        torch.manual_seed(1)
        backups.append(learner._backup(0 * one, one, following))
    assert torch.equal(backups[0], backups[1]) and not torch.equal(backups[1], backups[2])


def test_one_subset_chooses_and_another_one_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """With critics a and -a, one of each: chosen by either, valued by either, as often."""
    learner = make(hidden=(), subset=1)
    slopes(learner.target, [1.0, -1.0])
    state, one = {"state": torch.zeros(1, 1)}, torch.ones(1)
    noise = torch.tensor([[-0.5, 0.1, 0.7, 0.0, 0.0, 0.0]])
    monkeypatch.setattr(learner.online, "sample_noise", lambda n, explore: noise)
    proposals = learner.online.proposals(state, noise)
    high, low = proposals.max().item(), proposals.min().item()
    seen = torch.cat([learner._backup(0 * one, one, state) for _ in range(400)])
    for value in (high, -high, low, -low):
        share = (seen - value).abs().lt(1e-5).float().mean().item()
        assert share == pytest.approx(0.25, abs=0.09)


@pytest.mark.parametrize("scale", [0.2, 1.0])
def test_the_entropy_of_an_edit_is_sought_in_units_of_its_scale(scale: float) -> None:
    """D = 2, h = -0.5, as the density of an edit is that of the scaled one."""
    assert make(chunk=2, scale=scale).entropy == pytest.approx(2 * (-0.5 + math.log(scale)))


def test_the_edit_loss_by_hand() -> None:
    learner = make(hidden=(), critics=2, initial_temperature=0.3)
    slopes(learner.critic, [1.0, 5.0])
    batch = rows(16)
    batch["action"][0] = 0.95  # an edit may leave the box: it is cut off
    torch.manual_seed(6)
    loss, _ = learner._actor_loss(batch)
    torch.manual_seed(6)
    seen = {"state": batch["obs/state"], "base_action": batch["action"]}
    u, plain = learner.online.edit.sample(seen, torch.randn(16, 1))
    edited = (batch["action"] + 0.2 * u).clamp(-1, 1)
    expected = (0.3 * (plain - math.log(0.2)) - 3 * edited[:, 0]).mean()
    torch.testing.assert_close(loss, expected)


def test_what_each_step_moves() -> None:
    learner = make(base_tau=0.25)
    online = learner.online
    parts = {
        "base": learner.base_params,
        "edit": list(online.edit.parameters()),
        "critic": learner.critic_params,
        "acting base": learner.ema_base_params,
    }
    for step, changed in (
        (lambda: learner._base_step(rows(16)), {"base", "acting base"}),
        (lambda: learner.soft_actor_step(rows(16)), {"edit"}),
        (lambda: learner.critic_step(rows(16)), {"critic"}),
    ):
        before = {name: copies(part) for name, part in parts.items()}
        step()
        assert {name for name in parts if any(moved(before[name], parts[name]))} == changed
        if "base" in changed:
            require_average(parts["acting base"], before["acting base"], parts["base"], 0.25)
    acting = learner.policy
    assert acting.edit is online.edit and acting.critic is online.critic is learner.critic
    assert not any(weight.requires_grad for weight in acting.base.parameters())


SPEC = Spec({"state": Leaf((2,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)


def made(execute: int | None = None, **settings: Any) -> DsrlNa:
    torch.manual_seed(0)
    around = node_of("policies.steering.dsrl_na.DsrlNa", bound=2.0)
    inner = node_of("policies.gaussian.Gaussian", hidden=[32])
    base = build({**FLOW, "chunk": 2}, Policy, spec=SPEC)
    policy = dsrl_na.DsrlNa.wrap(base, around, inner)
    given = {"batch_size": 64, "hidden": [32], **settings}
    return make_learner("finetune.dsrl_na.DsrlNa", policy, RunPlan(execute=execute), **given)


def test_backup_is_the_least_value_of_what_the_base_does_at_the_chosen_noise() -> None:
    learner = made(entropy_in_backup=True, initial_temperature=0.5)
    reward, discount = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.9])
    state = {"state": torch.tensor([[0.1, 0.2], [0.3, 0.4]])}
    torch.manual_seed(5)
    found = learner._backup(reward, discount, state)
    torch.manual_seed(5)
    u, log_prob = learner.actor.sample(state, learner.actor.sample_noise(2, True))
    chunk, _ = learner.policy.base.act(state, {}, 2.0 * u)
    q = learner.target(state, chunk.flatten(1)).amin(0)
    torch.testing.assert_close(found, reward + discount * (q - 0.5 * log_prob))


def test_rows_hold_what_was_executed() -> None:
    learner = made()
    actor = Actor(learner.policy, 3, explore=True)
    first = actor({"state": torch.randn(3, 2)}, torch.ones(3, dtype=torch.bool))
    assert actor.stored_action.shape == (3, 2)
    assert torch.equal(actor.stored_action[:, :1], first)


def test_noises_are_the_actors_and_normal_ones() -> None:
    learner = made(actor_share=0.25)
    torch.manual_seed(1)
    u = learner._noises({"state": torch.zeros(4000, 2)})
    assert u[:1000].abs().max() <= 1
    assert (2.0 * u[1000:]).std().item() == pytest.approx(1, abs=0.03)
    assert made(actor_share=0.0)._noises({"state": torch.zeros(9, 2)}).shape == (9, 2)


def test_it_learns_from_what_another_policy_did_and_the_base_stays() -> None:
    """One decision pays -|a - a*|^2; the rows are uniform actions, none of them the base's. a* is
    what the base does at a noise within the bound, so the best that steering can do is 0."""
    learner = made(actor_lr=3e-3, critic_lr=3e-3, initial_temperature=1e-4)
    base, state = learner.policy.base, {"state": torch.zeros(1, 2)}
    before = copies(base.state_dict().values())

    def miss(u: Tensor) -> float:
        return float((learner.policy.play(state, u).flatten(1) - best).detach().square().sum())

    best = learner.policy.play(state, torch.tensor([[0.8, -0.7]])).flatten(1)
    begun = miss(torch.zeros(1, 2))
    for _ in range(400):
        action = torch.rand(64, 2) * 2 - 1
        learner.update(still(torch.zeros(64, 2), action, -(action - best).square().sum(1)))
    ended = miss(learner.actor.act(state, {}, learner.actor.sample_noise(1))[0].squeeze(1))
    assert begun > 0.1 and ended < 0.1 * begun, (begun, ended)
    assert not any(moved(before, base.state_dict().values()))
    assert all(p.grad is None for p in base.parameters())


def test_part_of_a_chunk() -> None:
    """With execute=1 of 2, critics judge the one action that was played."""
    learner = made(execute=1)
    learner.update(still(torch.zeros(64, 2), torch.zeros(64, 1), torch.ones(64)))
    assert learner.critic.ensemble.weights[0].shape[1] == 2 + 1


def test_a_base_that_ignores_its_noise_and_too_large_a_subset_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"subset=3 is not in 1\.\.2"):
        make(subset=3)
    learner, given = made(), still(torch.zeros(64, 2), torch.zeros(64, 2), torch.zeros(64))
    learner.fit(given)
    learner.policy.base.get_buffer("range.radius").zero_()
    with pytest.raises(ConfigError, match="nothing to steer"):
        learner.fit(given)


allow("tests")
LENGTH = 3


class Doors(Reach):
    """Episodes of 3 steps; success in the last one if the first action was right.

    `sides` false: right is an action between 0.3 and 0.4; else one of at least 0.1 on the side, -1
    or 1, that the first number of the observation says. The second says nothing.
    """

    def __init__(self, num_envs: int = 4, sides: bool = True) -> None:
        super().__init__(num_envs)
        self.spec = self.spec.with_act(Leaf((1,), low=-1.0, high=1.0))
        self.sides, self.right = sides, torch.zeros(num_envs, dtype=torch.bool)

    def _draw(self, row: int) -> Tensor:
        side, other = super()._draw(row)
        return torch.stack([side.sign(), other])

    def step(self, action: Tensor) -> Step:
        a, following = action[:, 0], {"state": self.place}
        right = a * self.place[:, 0] >= 0.1 if self.sides else (a - 0.35).abs() < 0.05
        self.right = torch.where(self.age == 0, right, self.right)
        self.age = self.age + 1
        ended = self.age == LENGTH
        success = ended & self.right
        if ended.any():
            self._begin(ended)
        obs, log = {"state": self.place}, {"success": success}
        return Step(obs, following, success.float(), ended, ended & False, log)

    def get_state(self) -> Tensors:
        return {**super().get_state(), "right": self.right.clone()}

    def set_state(self, state: Tensors) -> Tensors:
        self.right = state["right"].clone()
        return super().set_state(state)


@dataclass(frozen=True)
class EchoConfig:
    """No settings."""


class Echo(Policy):
    """Its chunk of two actions is its noise."""

    chunk = 2

    def __init__(self, config: EchoConfig, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.randn(n, 2)

    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        return noise[:, :, None].clamp(-1, 1), carry


ECHO = {"_target_": f"{__name__}.Echo"}
TICKET = "policies.steering.ticket.Ticket"


def echo(spec: Spec) -> Policy:
    return build(ECHO, Policy, spec=spec)


def search(folder: Path, per_context: bool, sides: bool, **more: Any) -> dict[str, Any]:
    """A run that searches the noise of Echo."""
    env = {"_target_": f"{__name__}.Doors", "sides": sides}
    base = run_folder(folder / "base", env, ECHO, (0,))
    ticket = node_of(TICKET, candidates=16, per_context=per_context)
    given = {"init": str(base), "finetune": ticket, "policy": None, "steps": 1200, **more}
    learner = node_of("learners.finetune.ticket.TicketSearch")
    return settings(folder / "run", "on_policy", learner=learner, env=env, **given)


def score(folder: Path, sides: bool) -> float:
    """Success of a run's policy in 200 other episodes."""
    result = evaluate(checkpoint.load_policy(folder), Doors(20, sides), 200, 1000)
    assert result.success is not None
    return float(result.success.float().mean())


def test_halving_finds_the_one_vector_that_succeeds(tmp_path: Path) -> None:
    folder = run(search(tmp_path, per_context=False, sides=False, seed=2))  # one of 16 is right
    policy = checkpoint.load_policy(folder)
    assert isinstance(policy, Ticket)
    good = ((policy.vectors[:, 0] - 0.35).abs() < 0.05).nonzero().flatten()
    assert good.tolist() == policy.value.argmax(0).tolist()
    assert score(folder, sides=False) == 1.0


@pytest.mark.parametrize(("per_context", "low", "high"), [(True, 0.95, 1.0), (False, 0.0, 0.7)])
def test_the_first_observation_chooses_the_vector(
    tmp_path: Path, per_context: bool, low: float, high: float
) -> None:
    """One vector for all can be right on one side only."""
    assert low < score(run(search(tmp_path, per_context, True)), True) <= high


@pytest.mark.parametrize("per_context", [True, False])
def test_resume_is_exact(tmp_path: Path, per_context: bool) -> None:
    """Stopped in the middle of an episode and of a chunk."""
    resumed(search(tmp_path, per_context, True, steps=240), 116)


def searcher(per_context: bool = False, candidates: int = 4, decisions: int = 0) -> Any:
    torch.manual_seed(0)
    node = node_of(TICKET, candidates=candidates, per_context=per_context)
    policy = resolve(node["_target_"], PolicyWrapper).wrap(echo(Doors().spec), node)
    return make_learner("finetune.ticket.TicketSearch", policy, RunPlan(decisions=decisions))


def batch(first: list[list[int]], ended: list[list[int]], reward: list[list[float]]) -> Tensors:
    """Decisions [T, 2] of vectors 1 and 2, all valid but one of the second environment."""
    shape = torch.Size((len(first), 2))
    valid = torch.ones(shape, dtype=torch.bool)
    valid[-1, 1] = False
    over = torch.tensor(ended, dtype=torch.bool)
    return {
        "obs/state": torch.arange(2.0 * shape.numel()).view(*shape, 2),
        "candidate": torch.tensor([1, 2]).expand(shape).contiguous(),
        "first": torch.tensor(first, dtype=torch.bool),
        "ended": over,
        "valid": valid,
        "reward": torch.tensor(reward),
        "discount": 0.5 * ~over,
    }


def test_returns_of_whole_episodes_across_updates() -> None:
    learner = searcher(per_context=True)
    learner.update(batch([[1, 1], [0, 0]], [[0, 0], [0, 0]], [[1.0, 2.0], [4.0, 100.0]]))
    assert learner.episodes == {} and learner.started.tolist() == [0, 1, 1, 0]
    learner.update(batch([[0, 0], [1, 1]], [[1, 1], [0, 0]], [[8.0, 6.0], [0.0, 0.0]]))
    # 1 + 4 / 2 + 8 / 4 of the first, 2 + 6 / 2 of the second, whose second decision is not valid.
    assert learner.episodes["returns"].tolist() == [5.0, 5.0]
    assert learner.episodes["candidate"].tolist() == [1, 2]
    assert learner.episodes["context"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert learner.started.tolist() == [0, 2, 1, 0] and learner.decisions == 6


def test_each_round_closes_the_worse_half_and_plays_what_was_played_least() -> None:
    learner = searcher(candidates=8, decisions=300)
    learner.started = torch.full((8,), 2)
    learner.started[[4, 5]] = 1
    learner.episodes = {"candidate": torch.arange(8), "returns": torch.arange(8.0)}
    for decisions, left in ((99, 8), (100, 4), (200, 2), (299, 2)):
        learner.decisions = decisions
        learner._halve()
        assert learner.open.nonzero().flatten().tolist() == list(range(8 - left, 8))
    explored = learner.policy.choose({}, learner.policy.sample_noise(64, explore=True))
    assert set(explored.tolist()) == {6, 7}
    assert learner.policy.choose({}, learner.policy.sample_noise(1)).item() == 7
    learner.started[6] = 1
    learner._halve()
    assert set(learner.policy.choose({}, learner.policy.sample_noise(9, True)).tolist()) == {6}


def test_what_does_not_matter_to_the_choice_is_ignored() -> None:
    """Returns with a part common to all groups and one slope, of column 2, for each group."""
    torch.manual_seed(0)
    n, groups = 600, 6
    x = torch.cat([torch.ones(n, 1), torch.randn(n, 5)], 1).double()
    group, slope = torch.arange(n) % groups, torch.randn(groups).double()
    y = 3 * x[:, 4] + slope[group] * x[:, 2] + 0.3 * torch.randn(n)
    mean, root = posterior(x, y, group, groups)
    torch.testing.assert_close(mean[:, 2], slope - slope.mean(), atol=0.2, rtol=0)
    assert mean[:, [0, 1, 3, 4, 5]].abs().max() < 0.1
    rows = x[group == 1]
    covariance = root[1].T @ root[1]
    noise = 0.3**2
    expected = torch.linalg.inv(rows.T @ rows / noise)[2, 2]
    assert covariance[2, 2].item() == pytest.approx(expected.item(), rel=0.2)


def test_contexts_are_standardised_and_long_ones_shortened() -> None:
    torch.manual_seed(0)
    few = torch.randn(50, 3).double() * torch.tensor([1.0, 100.0, 0.0]) + 7
    z = (few - few.mean(0)) @ principal(few - few.mean(0), 8)
    torch.testing.assert_close(z.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]).double())
    many = torch.randn(50, 2).double() @ torch.randn(2, 40).double()
    z = (many - many.mean(0)) @ principal(many - many.mean(0), 4)
    torch.testing.assert_close(z.T @ z / 50, torch.tensor([1.0, 1.0, 0.0, 0.0]).double().diag())


def test_an_episode_keeps_its_vector() -> None:
    policy = searcher(per_context=True, candidates=8).policy
    actor, first = Actor(policy, 3, explore=True), torch.ones(3, dtype=torch.bool)
    played: list[list[int]] = []
    for step in range(8):
        actor({"state": torch.randn(3, 2)}, first & (step in (0, 5)))
        played.append(actor.extras["candidate"].tolist())
        assert torch.equal(actor.plan[:, :, 0], policy.vectors[played[-1]].clamp(-1, 1))
    assert played[0] == played[4] and played[5] == played[7] and played[4] != played[5]


def test_one_vector_is_exported_and_a_choice_is_refused() -> None:
    single = Decision(searcher().policy)
    assert single.inputs == ["obs/state", "noise"]
    state, noise = torch.randn(3, 2), torch.zeros(3, 4)
    assert torch.equal(single(state, noise), single(state + 1, noise))
    with pytest.raises(ConfigError, match="Ticket carries candidate from one decision"):
        Decision(searcher(per_context=True).policy)


def test_a_choice_needs_features() -> None:
    spec = Spec({"front": Leaf((8, 8, 3), "uint8")}, Leaf((1,), low=-1.0, high=1.0), 0.1)
    with pytest.raises(ConfigError, match=r"Echo offers no features .*per_context=false"):
        Ticket.wrap(echo(spec), node_of(TICKET))
    assert Ticket.wrap(echo(spec), node_of(TICKET, per_context=False)).chunk == 2
