"""Demonstrations in a run: whose steps are imitated, and in which fine-tuning they are mixed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes
from embodied.datasets.lerobot.writer import EpisodeWriter
from embodied.policies.scripted.intervener import Intervener
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.demonstrations import rows_for
from tests.builders import node_of, random_demos, recorded, run_folder
from tests.toy_envs import Reach
from tests.training.test_train import run, same, settings, weights

SPEC = Spec({"state": Leaf((2,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1, text="go to the origin")
PERSON, POLICY = 0.5, -0.9  # their actions
TAKEN = [False, False, True, True, True, False]  # of each episode: three steps are a person's
FLOW = {"_target_": "embodied.policies.generative.flow.Flow", "chunk": 2}
BC = {"_target_": "embodied.learners.imitation.behavior_cloning.BehaviorCloning", "batch_size": 64}
DAGGER = {"_target_": "embodied.learners.imitation.hg_dagger.HgDagger", "batch_size": 64}
CORRECTED = {
    "_target_": "embodied.rewards.success.interventions.Interventions",
    "pay": "env",
    "intervener": {"_target_": "tests.training.test_imitated_steps.Always"},
}


class Always(Intervener):
    """A person who has taken over every step."""

    def over(self, obs: dict[str, torch.Tensor], first: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(first)

    def act(self, obs: dict[str, torch.Tensor], first: torch.Tensor) -> torch.Tensor:
        return torch.full((len(first), 2), PERSON)


def record(path: Path, taken: list[bool] | None, episodes: int = 4) -> str:
    """`taken`: whose steps; None: a recording that does not say (a person's)."""
    theirs = torch.tensor(taken or [True] * len(TAKEN))
    count = len(theirs)
    flags = {} if taken is None else {"intervened": theirs}
    with EpisodeWriter(path, SPEC) as writer:
        for _ in range(episodes):
            action = torch.where(theirs, PERSON, POLICY)[:, None].expand(-1, 2)
            seen = {"state": torch.rand(count + 1, 2)}
            last = torch.arange(count) == count - 1
            writer.add(recorded(seen, action, truncated=last, **flags))
    return str(path)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record(tmp_path_factory.mktemp("demos") / "mixed", TAKEN)


def made(folder: Path, data: str, **changes: Any) -> Any:
    return RunComponents(read_config(settings(folder, data, **changes)))


def sampled(folder: Path, demos: Any, **changes: Any) -> dict[str, torch.Tensor]:
    """What behaviour cloning of `demos` samples, in chunks of two steps."""
    built = made(folder, "offline", learner=BC, demos=demos, policy=FLOW, **changes)
    return built.loop.source.sample(500)


def test_the_policys_own_steps_are_cloned_if_a_setting_says_so(tmp_path: Path, mixed: str) -> None:
    batch = sampled(tmp_path, mixed)
    assert batch["valid"][:, 0].all() and not batch["valid"].all(), "a chunk ends where they let go"
    assert (batch["action"][batch["valid"]] == PERSON).all()
    batch = sampled(tmp_path, mixed, demo_policy_steps=True)
    share = (batch["action"][:, 0, 0] == POLICY).float().mean().item()
    assert share == pytest.approx(0.5, abs=0.1)


def test_whole_demonstrations_are_all_cloned(tmp_path: Path, mixed: str) -> None:
    """Beside a recording with interventions, too, and where each step is marked as a person's."""
    whole, own = record(tmp_path / "whole", None), record(tmp_path / "own", [True] * 6)
    for demos, count in ((whole, 24), (own, 24), ([whole, mixed], 24 + 12)):
        states = sampled(tmp_path / "run", demos)["obs/state"].unique(dim=0)
        assert len(states) == count


def test_without_an_environment_held_out_steps_are_a_persons(tmp_path: Path) -> None:
    """Also where some episodes have no intervention at all."""
    quiet, mixed = record(tmp_path / "quiet", [False] * 6, 30), record(tmp_path / "mixed", TAKEN, 3)
    more = {"env": None, "policy": FLOW, "learner": BC, "demos": [quiet, mixed]}
    held = made(tmp_path / "run", "offline", **more).loop.held_out
    assert len(held.index) > 0
    action, valid = held.rows["action"][held.index], held.rows["valid"][held.index]
    assert valid[:, 0].all() and (action[valid] == PERSON).all()


def test_dagger_learns_from_a_persons_steps_of_a_recording(tmp_path: Path, mixed: str) -> None:
    """Of chunks, from those that the policy did not end."""

    def buffers(**changes: Any) -> Any:
        more = {"learner": DAGGER, "reward": CORRECTED, "demos": mixed} | changes
        return made(tmp_path, "off_policy", **more).loop.buffers

    batch = buffers().demos.sample(500)
    assert torch.equal(batch["intervened"], batch["action"][:, 0] == PERSON)
    assert 0.4 < batch["intervened"].float().mean() < 0.6
    chunks = buffers(policy=FLOW, reward=None).demos.sample(500)
    assert torch.equal(chunks["intervened"], (chunks["action"] == PERSON).all(1))
    assert buffers(demo_policy_steps=True).demos.sample(500)["intervened"].all()
    stored = buffers(demo_fraction=None).replay.take(torch.arange(24))
    assert torch.equal(stored["intervened"], stored["action"][:, 0] == PERSON)


def test_dagger_does_not_imitate_its_own_policy(tmp_path: Path, mixed: str) -> None:
    """Without a person the environment's transitions have no `intervened`."""
    with pytest.raises(ConfigError, match="interventions"):
        made(tmp_path, "off_policy", learner=DAGGER, demos=mixed, warmup_steps=0).loop._step()


def test_ppo_with_demonstrations_imitates_a_persons_steps(tmp_path: Path, mixed: str) -> None:
    learner = node_of("learners.on_policy.ppo_demos.PpoDemos", horizon=8)
    policy = node_of("policies.diagonal_gaussian.DiagonalGaussian")
    shown = made(tmp_path, "on_policy", learner=learner, policy=policy, demos=mixed).learner.shown
    assert (shown["action"][shown["valid"]] == PERSON).all()
    assert shown["valid"][:, 0].all() and len(shown["valid"]) == 12


@pytest.mark.parametrize("learner", [BC, DAGGER])
def test_recordings_without_a_persons_step_are_refused(
    tmp_path: Path, learner: dict[str, Any]
) -> None:
    quiet = record(tmp_path / "quiet", [False] * 6)
    data = "offline" if learner is BC else "off_policy"
    with pytest.raises(ConfigError, match="demo_policy_steps=true"):
        made(tmp_path / "run", data, learner=learner, demos=quiet)
    made(tmp_path / "run", data, learner=learner, demos=quiet, demo_policy_steps=True)


@pytest.mark.parametrize(
    ("data", "learner", "taken", "says"),
    [
        ("off_policy", DAGGER, "no", "demos=DIR"),
        ("off_policy", None, TAKEN, "imitates"),
        ("offline", BC, None, "intervention"),
    ],
)
def test_the_setting_is_refused_where_it_has_no_effect(
    tmp_path: Path, data: str, learner: Any, taken: Any, says: str
) -> None:
    more = {"learner": learner} if learner else {}
    more |= {} if taken == "no" else {"demos": record(tmp_path / "demos", taken)}
    with pytest.raises(ConfigError, match=says):
        made(tmp_path / "run", data, demo_policy_steps=True, **more)


SAC = {"_target_": "embodied.learners.off_policy.sac.Sac", "batch_size": 32}
ALIASED = {"_target_": "embodied.learners.finetune.dsrl_na.DsrlNa", "batch_size": 32}


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """A base in a checkpoint, and demonstrations by somebody else."""
    base = node_of("policies.generative.flow.Flow", chunk=2, width=16)
    reach = {"_target_": "tests.toy_envs.Reach"}
    init = str(run_folder(tmp_path / "base", reach, base, (0,)))
    return {"init": init, "demos": random_demos(tmp_path / "demos", 4), "normalize": True}


def test_executed_actions_take_demonstrations(given: dict[str, Any], tmp_path: Path) -> None:
    steered = node_of("policies.steering.dsrl_na.DsrlNa")
    run(settings(tmp_path / "run", finetune=steered, learner=ALIASED, **given))
    base = checkpoint.load_policy(given["init"]).state_dict()
    learned = checkpoint.load_policy(tmp_path / "run")
    assert same(base, {key: learned.state_dict()[f"base.{key}"] for key in base})
    assert learned.chunk == 2


@pytest.mark.parametrize("execute", [1, 2])
def test_corrections_take_demonstrations(
    given: dict[str, Any], tmp_path: Path, execute: int
) -> None:
    """What a run with corrections recorded is described as that run stored it."""
    steered = node_of("policies.steering.residual.Residual", scale=0.5, execute=execute)
    learner = SAC | {"n_step": 3}
    built = made(tmp_path / "run", "off_policy", finetune=steered, learner=learner, **given)
    policy = built.policy
    policy.base.sample_noise = lambda n, explore=False: torch.zeros(n, *policy.base_noise)
    env = Reach(1)
    obs, carry = env.reset(0), policy.initial(1)
    tape: list[Tensors] = []
    for _ in range(5):
        noise = policy.sample_noise(1, explore=True)
        with torch.no_grad():
            decision, carry = policy.observe(obs, carry, noise)
            action, carry = policy.act(decision, carry, noise)
        step = env.step(action[:, 0])
        seen = {"base": decision["base_action"], "correction": carry["row/action"]}
        acted = {"obs/state": obs["state"], "action": action[:, 0], "reward": step.reward}
        tape.append({**seen, **acted})
        obs = step.obs
    steps = tt.cat(tape)
    base, correction = steps.pop("base"), steps.pop("correction")
    never = torch.zeros(5, dtype=torch.bool)
    steps |= {"terminated": never, "truncated": never}
    start, length, final = torch.tensor([0]), torch.tensor([5]), {"state": obs["state"]}
    whole = Episodes(built.episodes.spec, steps, start, length, final)
    rows = rows_for(whole, policy, built.learner, None)
    torch.testing.assert_close(rows["obs/base_action"], base)
    torch.testing.assert_close(rows["action"], correction)
    torch.testing.assert_close(rows["next_obs/base_action"][:2], base[3:])
    batch = built.loop.buffers.demos.sample(32)
    assert batch["obs/base_action"].shape == batch["action"].shape == (32, 2)


def test_a_run_of_corrections_with_demonstrations(given: dict[str, Any], tmp_path: Path) -> None:
    steered = node_of("policies.steering.residual.Residual", scale=0.5, dims=[1])
    node = settings(tmp_path / "run", finetune=steered, learner=SAC, **given)
    again = run(node | {"out": str(tmp_path / "again")})
    assert same(weights(run(node)), weights(again))


def test_chosen_noise_does_not(given: dict[str, Any], tmp_path: Path) -> None:
    steered = node_of("policies.steering.dsrl.Dsrl")
    with pytest.raises(ConfigError, match="cannot use demonstrations"):
        run(settings(tmp_path / "run", finetune=steered, learner=SAC, **given))
