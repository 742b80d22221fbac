"""GR-RL's parts: categorical values offline, the filter by progress, the shell, the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.commands.train import train
from embodied.core.build import ConfigError, build
from embodied.datasets.lerobot.reader import read_episodes
from embodied.learners.offline.critic_progress import Config, CriticProgress, keeps_progress, value
from embodied.learners.offline.rebrac import Rebrac
from embodied.training.logger import read_metrics
from tests.builders import LINE, exit_of, make_learner, make_policy, node_of, transitions
from tests.learners.finetune.test_expo import made
from tests.learners.parts import constant

STEP, GAMMA = 0.05, 0.95


def rebrac(**settings: object) -> Rebrac:
    policy = make_policy("deterministic.Deterministic", LINE, hidden=[32])
    given = {"hidden": [32, 32], "atoms": 3, "values": [0.0, 1.0], "gamma": GAMMA, **settings}
    return make_learner("offline.rebrac.Rebrac", policy, **given)


SURE = torch.tensor([[-99.0, -99.0, 0.0], [-99.0, 0.0, -99.0]])  # 1 and 1/2 of the atoms 0, 1/2, 1


LOGITS = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])


def test_rebrac_backs_up_the_distribution_of_the_smaller_mean() -> None:
    """Targets 0 + 0.9 / 2 = 0.45 (nine tenths on 1/2, a tenth on 0) and the end, 1. The penalty is
    taken from the reward: 0.9 (1/2 - 10 |a~ - a'|^2) is below the lowest atom."""
    p = LOGITS.log_softmax(1)
    batch = transitions(2, LINE)
    batch |= {"reward": torch.tensor([0.0, 1.0]), "discount": torch.tensor([0.9, 0.0])}
    learned = {0.0: 0.1 * p[:, 0] + 0.9 * p[:, 1], 10.0: p[:, 0]}
    for penalty, first in learned.items():
        learner = rebrac(critic_bc=penalty, target_noise=0.0)
        constant(learner.target.ensemble, SURE)
        constant(learner.critic.ensemble, LOGITS)
        action = learner.target_policy({"state": batch["next_obs/state"]})
        batch["next_action"] = action - action.sign()
        loss, mean = learner._critic_loss(batch)
        assert loss.item() == pytest.approx(-(first + p[:, 2]).sum().item() / 2, rel=1e-5)
        values = p.exp() @ torch.tensor([0.0, 0.5, 1.0])
        assert mean.item() == pytest.approx(values.mean().item(), rel=1e-5)
        progress = value(learner, LOGITS[:, None].expand(-1, 2, -1))
        assert progress.tolist() == pytest.approx([values.mean().item()] * 2)


def test_a_step_is_kept_unless_progress_falls_soon_after() -> None:
    """Two episodes of 5 and 3 steps; window 2. The second episode begins low, which is no fall."""
    progress = torch.tensor([0.5, 0.6, 0.7, 0.5, 0.8, 0.1, 0.1, 0.06])
    config = Config(run="unused", delta=0.05, window=2)
    kept = keeps_progress(progress, torch.tensor([5, 3]), config)
    assert kept.tolist() == [True, False, False, True, True, True, True, True]
    whole = Config(run="unused", delta=0.15, window=9)
    kept = keeps_progress(progress, torch.tensor([5, 3]), whole)
    assert kept.tolist() == [True, True, False, True, True, True, True, True]
    with pytest.raises(ConfigError, match=r"weighting\.run=RUN"):
        CriticProgress(Config())


def test_a_run_samples_the_steps_that_keep_their_progress(tmp_path: Path) -> None:
    demos = tmp_path / "demos"
    assert exit_of("demos", "collect", "env=two_gap", "episodes=4", f"out={demos}") == 0
    count = int(read_episodes(demos).length.sum())
    small = ("env=two_gap", "size=debug", "steps=2", f"demos={demos}")
    words = ("policy=deterministic", "policy.chunk=2", "learner=td3_bc", "learner.atoms=11")
    run = train([*words, *small, f"out={tmp_path / 'critic'}"])
    flow = ("policy=flow", "learner=imitate", "weighting=critic_progress", f"weighting.run={run}")
    out = train([*flow, *small, "weighting.delta=100", f"out={tmp_path / 'all'}"])
    assert read_metrics(Path(out))[0]["data/rows"] == count
    out = train(
        [*flow, *small, "weighting.delta=0", "weighting.window=20", f"out={tmp_path / 'f'}"]
    )
    assert 4 <= read_metrics(Path(out))[0]["data/effective_rows"] < count
    with pytest.raises(ConfigError, match="no critics of actions"):
        train([*flow, *small, f"weighting.run={out}", f"out={tmp_path / 'none'}"])


def test_categorical_values_of_noise_by_hand() -> None:
    learner = made(atoms=3)
    state = {"state": torch.zeros(2, 2)}
    constant(learner.target.ensemble, SURE)
    backup = learner._backup(torch.tensor([0.0, 1.0]), torch.tensor([0.9, 0.0]), state)
    torch.testing.assert_close(backup, torch.tensor([[0.1, 0.9, 0.0], [0.0, 0.0, 1.0]]))
    constant(learner.critic.ensemble, SURE)
    constant(learner.noise_critic.ensemble, LOGITS)
    p = LOGITS.log_softmax(1)  # each learns the distribution of its own member
    assert learner._distil_loss(state).item() == pytest.approx(-(p[0, 2] + p[1, 1]).item())


def test_noise_is_free_within_the_shell() -> None:
    """Bound 2: |w|^2 / 2 is 4 (1 + 0) / 2 = 2 and 4 (0.01 + 0.01) / 2 = 0.04; the shell is 0.25."""
    learner, without = made(shell_weight=3.0, shell=0.25), made()
    u = torch.tensor([[1.0, 0.0], [0.1, -0.1]])
    torch.testing.assert_close(learner.beyond_shell(u), torch.tensor([1.75, 0.0]))
    state = {"state": torch.zeros(64, 2)}
    without.load_state_dict(learner.state_dict())
    losses: list[Tensor] = []
    for one in (without, learner):
        torch.manual_seed(1)
        losses.append(one._actor_loss(state)[0])
    torch.manual_seed(1)
    drawn, _ = learner.actor.sample(state, learner.actor.sample_noise(64, True))
    penalty = 3 * learner.beyond_shell(drawn).mean()
    assert penalty > 0
    torch.testing.assert_close(losses[1], losses[0] + penalty)


def test_half_of_a_batch_is_new() -> None:
    node = node_of("buffers.replay.NewestReplayBuffer", share=0.5, newest=2)
    buffer = build(node, ReplayBuffer, capacity=8)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(2)
    buffer.add({"reward": torch.ones(1)})
    assert buffer.sample(4)["reward"].tolist() == [1, 1, 1, 1]
    buffer.add({"reward": torch.arange(2.0, 11.0)})  # 9 and 10 are where 1 and 2 were
    torch.manual_seed(0)
    found = buffer.sample(8000)["reward"]
    assert found.unique().tolist() == list(range(3, 11))
    halves = (found >= 9).float().view(2, -1).mean(1)  # they are spread over the batch
    assert halves.tolist() == pytest.approx([0.5 + 0.5 * 2 / 8] * 2, abs=0.03)
