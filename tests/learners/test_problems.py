"""Off-policy learners: problems, refusals, what is put around them, the bounds of settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.core.build import ConfigError, build, parse, resolve
from embodied.core.tensors import Tensors, under
from embodied.evaluation.evaluate import evaluate
from embodied.learners import acceleration
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import Learner, RunPlan, frozen
from embodied.training.collector import Collector
from tests.builders import LINE, SPEC, make_learner, make_policy, still, transitions
from tests.contract.test_learner import batch_for, make, node
from tests.toy_envs import Reach

RATES = {"critic_lr": 3e-3, "actor_lr": 3e-3}
NORMAL = "diagonal_gaussian.DiagonalGaussian"
SOFT = {"temperature_lr": 1e-2, "initial_temperature": 0.05, "target_entropy": -3.0}


@pytest.mark.parametrize(
    ("target", "policy", "settings"),
    [
        ("sac.Sac", "gaussian.Gaussian", SOFT),
        ("td3.Td3", "deterministic.Deterministic", {}),
        ("dsac_t.DsacT", "gaussian.Gaussian", SOFT),
    ],
)
def test_bandit_is_solved(target: str, policy: str, settings: dict[str, Any]) -> None:
    """Q(a) = 1 - (a - 0.5)^2 when every decision ends the world; the best action is 0.5."""
    acting = make_policy(policy, LINE, hidden=[32])
    given = {"hidden": [32], "batch_size": 64, **RATES, **settings}
    learner = make_learner(f"off_policy.{target}", acting, **given)
    for _ in range(800):
        action = torch.rand(64, 1) * 2 - 1
        learner.update(still(torch.zeros(64, 1), action, 1 - (action[:, 0] - 0.5).square()))
    best = acting.act({"state": torch.zeros(1, 1)}, {}, torch.zeros(1, 1))[0].item()
    assert best == pytest.approx(0.5, abs=0.12)
    if not target.startswith("dsac"):
        grid = torch.linspace(-0.9, 0.9, 7)[:, None]
        q = learner.critic({"state": torch.zeros(7, 1)}, grid).detach()
        expected = (1 - (grid[:, 0] - 0.5).square()).expand(2, 7)
        torch.testing.assert_close(q, expected, atol=0.06, rtol=0)


SMALL = {"hidden": [64, 64]}


@pytest.mark.parametrize(
    ("target", "policy", "settings"),
    [
        ("sac.Sac", "gaussian.Gaussian", {"initial_temperature": 0.1}),
        ("td3.Td3", "deterministic.Deterministic", {}),
    ],
)
def test_learns_to_reach(target: str, policy: str, settings: dict[str, Any]) -> None:
    """The real collector, replay and update; a policy that stands still scores about -15, full
    speed from everywhere about -3.5."""
    env = Reach(8)
    acting = make_policy(policy, env.spec, **SMALL)
    given = {**SMALL, "batch_size": 128, "actor_lr": 1e-3, "critic_lr": 1e-3, **settings}
    learner = make_learner(f"off_policy.{target}", acting, **given)
    replay, rollout = ReplayBuffer(20_000), Collector(env, acting.warmup_policy(), 0.95, seed=0)
    for step in range(700):
        if step == 50:
            rollout.act_with(acting)
        replay.add(rollout.step()[0])
        if step >= 50:
            learner.update(replay.sample(128))
    assert evaluate(acting, Reach(50), 50, seed=1).returns.mean().item() > -5.5


@pytest.mark.parametrize(
    ("target", "policy", "says"),
    [
        ("off_policy.sac.Sac", "random.Random", "log-prob"),
        ("off_policy.dsac_t.DsacT", "deterministic.Deterministic", "log-prob"),
        ("off_policy.td3.Td3", "gaussian.Gaussian", "policy=deterministic"),
        ("off_policy.flashsac.Flashsac", "gaussian.Gaussian", "block_gaussian"),
        ("offline.iql.Iql", "random.Random", "needs a loss"),
        ("offline.fql.Fql", "generative.flow.Flow", "policy=one_step"),
        ("offline.qchunking.QChunking", "generative.flow.Flow", "policy=best_of_n"),
        ("finetune.expo.Expo", "generative.flow.Flow", "policy=edit"),
        ("finetune.dsrl_na.DsrlNa", "gaussian.Gaussian", "finetune=dsrl_na"),
        ("finetune.dppo.Dppo", "gaussian.Gaussian", "policy=noisy_diffusion"),
        ("on_policy.ppo.Ppo", "generative.flow.Flow", "policy=diagonal_gaussian"),
        ("off_policy.iwocs.Iwocs", "gaussian.Gaussian", "policy=iwocs_member"),
        ("imitation.recap.Recap", "generative.flow.Flow", "policy=advantage_conditioned"),
        ("on_policy.relic.Relic", NORMAL, "needs a transformer"),
        ("on_policy.sqirl.Sqirl", "gaussian.Gaussian", "policy=staged_categorical"),
        ("mdpo.Mdpo", "gaussian.Gaussian", "policy=diagonal_gaussian"),
        ("offline.fb.Fb", "deterministic.Deterministic", "policy=prompted"),
        ("finetune.ticket.TicketSearch", "gaussian.Gaussian", "finetune=ticket"),
        ("finetune.reinflow.Reinflow", "gaussian.Gaussian", "policy=noisy_flow"),
    ],
)
def test_policies_that_do_not_fit_are_refused(target: str, policy: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_learner(target, make_policy(policy, SPEC), run=RunPlan(1))


def test_a_recorded_update_needs_a_gpu() -> None:
    policy = make_policy("gaussian.Gaussian", SPEC)
    learner = make_learner("off_policy.sac.Sac", policy, cuda_graph=True)
    with pytest.raises(ConfigError, match="cuda_graph=true needs a GPU"):
        accelerate(learner).update(still(torch.zeros(256, 3), torch.zeros(256, 2), torch.ones(256)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("target", "policy", "settings"),
    [
        ("sac.Sac", "gaussian.Gaussian", {}),
        ("sac.Sac", "gaussian.Gaussian", {"critics": 4, "layer_norm": True, "utd": 2}),
        ("td3.Td3", "deterministic.Deterministic", {"target_delay": 3, "critic_lr": 1e-3}),
    ],
)
def test_a_recorded_update_learns_like_a_plain_one(
    target: str, policy: str, settings: dict[str, Any]
) -> None:
    """r = 1 for ever with discount 0.5: Q = 2; an update of TD3 has four kinds of step."""
    given = {"hidden": [32], "batch_size": 32, "cuda_graph": True, "tau": 0.05, **settings}
    given |= {"entropy_in_backup": False} if target == "sac.Sac" else {}
    learner = make_learner(f"off_policy.{target}", make_policy(policy, SPEC, hidden=[32]), **given)
    accelerate(learner.to("cuda"))
    n = learner.batch_size
    for _ in range(900):
        batch = transitions(n, SPEC, shift=0.1)
        batch |= {"reward": torch.ones(n), "discount": torch.full((n,), 0.5)}
        metrics = learner.update({key: leaf.cuda() for key, leaf in batch.items()})
    assert metrics["q_mean"].item() == pytest.approx(2.0, abs=0.4)


@pytest.mark.parametrize(
    ("target", "policy", "settings", "says"),
    [
        ("off_policy.h2o.H2o", "gaussian.Gaussian", {"n_step": 3}, "single steps"),
        ("off_policy.iwocs.Iwocs", "wrappers.iwocs.Member", {"n_step": 3}, "n_step=1"),
        ("off_policy.td3.Td3", "deterministic.Deterministic", {"values": [0, 1]}, "learner.atoms="),
        ("on_policy.hnpg.Hnpg", NORMAL, {"value": {"head": 0.1}}, "value.head"),
        ("offline.fb.Fb", "prompted.Prompted", {"n_step": 3}, "n_step"),
        (
            "on_policy.ppo.Ppo",
            "diagonal_gaussian.DiagonalGaussian",
            {"value": {"obs": ["truth"]}},
            'no observation "truth"',
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    target: str, policy: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_learner(target, make_policy(policy, SPEC), run=RunPlan(1), **settings)


RECORDED = ["sac", "td3", "dsac_t", "flashsac", "expo", "fql", "iql", "qchunking", "ppo", "bresa"]


class Replayed:
    """In place of a CUDA graph: counts its calls."""

    made: list[Replayed]

    def __init__(self, step: Callable[[Tensors], Tensors]) -> None:
        self.step, self.calls = step, 0
        Replayed.made.append(self)

    def __call__(self, batch: Tensors) -> Tensors:
        self.calls += 1
        return self.step(batch)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    Replayed.made = []
    monkeypatch.setattr(acceleration, "Graph", Replayed)


def with_settings(stem: str, **settings: bool) -> Learner:
    """A learner of `stem`, with the policy that it takes; BRESA hands settings to its SAC."""
    plain = make(stem)
    given = {**node("learner", stem), "batch_size": 8}
    given |= {"task": settings} if stem == "bresa" else settings
    if "horizon" in given:
        given["horizon"] = 6
    policy: Any = plain.online if stem == "expo" else plain.policy
    return build(given, Learner, policy=policy, spec=policy.spec, run=RunPlan(updates=100))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("stem", RECORDED)
def test_updates_are_recorded_and_a_loaded_state_forgets_the_recordings(stem: str) -> None:
    learner = accelerate(with_settings(stem, cuda_graph=True))
    learner.update(batch_for(learner))
    assert Replayed.made and all(graph.calls for graph in Replayed.made)
    known = len(Replayed.made)
    learner.set_state(copy.deepcopy(learner.get_state()))
    learner.update(batch_for(learner))
    assert len(Replayed.made) > known


@pytest.mark.parametrize("stem", RECORDED)
def test_losses_are_compiled(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()

    def compiled(loss: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (called.add(loss.__name__), loss(*given))[1]

    monkeypatch.setattr(acceleration.torch, "compile", compiled)
    learner = accelerate(with_settings(stem, compile=True))
    for _ in range(2):
        learner.update(batch_for(learner))
    part = learner.task if stem == "bresa" else learner
    assert called == set(part.losses)


@pytest.mark.usefixtures("graphs")
def test_each_kind_of_update_is_recorded_on_its_own() -> None:
    learner = accelerate(with_settings("td3", cuda_graph=True))
    for _ in range(4):
        learner.update(batch_for(learner))
    assert [graph.calls for graph in Replayed.made] == [2, 2]  # without and with the policy


def test_without_settings_nothing_is_put_around() -> None:
    learner = make("sac")
    accelerate(learner)
    assert learner.update.__func__ is type(learner).update  # type: ignore[attr-defined]


def test_native_code_is_for_exactly_its_class() -> None:
    assert native_obstacle(make("iql")) == ""
    assert native_obstacle(make("redq")) is None
    assert native_obstacle(make("td3_bc")) == "Rebrac has other losses"


def test_parameters_are_trainable_again_after_an_error() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="in the loss"), frozen([weight]):
        assert not weight.requires_grad
        raise RuntimeError("in the loss")
    assert weight.requires_grad


@pytest.mark.parametrize(("stem", "raised"), [("sac", 2.0), ("td3", 0.0)])
def test_a_prior_is_added_to_the_values_of_the_policy(stem: str, raised: float) -> None:
    """Of a constant 2: by that in the policy's loss, and, discounted, in SAC's target."""
    learner: Any = make(stem)
    batch = batch_for(learner)
    given = batch["reward"], batch["discount"], under(batch, "next_obs")

    def found() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        loss = learner._actor_loss(batch)
        return (loss[0] if stem == "sac" else loss), learner._backup(*given)

    loss, backup = found()
    learner.prior = lambda obs, action: torch.full((len(action),), 2.0)
    held, target = found()
    torch.testing.assert_close(held, loss - 2.0)
    torch.testing.assert_close(target, backup + raised * batch["discount"])


NONSENSE = [
    ("sac", "gamma", 99.0),
    ("sac", "hidden", [0]),
    ("flashsac", "atoms", 1),
    ("iql", "expectile", 0.0),
    ("bresa", "violation_buffer", 7),
    ("ppo_rapid", "weights", [1.0, 0.1, -0.1]),
    ("reinflow", "hold", 1.0),
]


@pytest.mark.parametrize(("stem", "setting", "value"), NONSENSE)
def test_nonsense_is_refused(stem: str, setting: str, value: Any) -> None:
    kind: Any = resolve(node("learner", stem)["_target_"], Learner)
    with pytest.raises(ConfigError, match=setting):
        parse(get_type_hints(kind.__init__)["config"], {setting: value}, "learner")
