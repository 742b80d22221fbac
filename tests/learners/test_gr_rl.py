"""GR-RL's parts: categorical values offline, the filter by progress, the shell, the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from embodied.buffers.newest import NewestReplayBuffer
from embodied.buffers.replay import ReplayBuffer
from embodied.commands.train import train
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors, take
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.datasets.transitions import transitions as recorded_transitions
from embodied.learners.critics import Critic
from embodied.learners.offline.critic_progress import (
    Config,
    CriticProgress,
    keeps_progress,
    value,
)
from embodied.learners.offline.rebrac import Rebrac
from embodied.training.logger import read_metrics
from tests.builders import exit_of, make_learner, make_policy, node_of, still, transitions
from tests.learners.finetune.test_expo import made

LINE = Spec({"state": Leaf((1,))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
STEP, GAMMA = 0.05, 0.95


def rebrac(**settings: object) -> Rebrac:
    policy = make_policy("deterministic.Deterministic", LINE, hidden=[32])
    given = {"hidden": [32, 32], "atoms": 3, "values": [0.0, 1.0], "gamma": GAMMA, **settings}
    return make_learner("offline.rebrac.Rebrac", policy, **given)


@torch.no_grad()
def constant(critic: Critic, logits: Tensor) -> None:
    """Critic i answers with the distribution `logits` [i] everywhere, [2, atoms]."""
    for parameter in critic.ensemble.parameters():
        parameter.zero_()
    critic.ensemble.biases[-1].copy_(logits[:, None])


SURE = torch.tensor([[-99.0, -99.0, 0.0], [-99.0, 0.0, -99.0]])  # 1 and 1/2 of the atoms 0, 1/2, 1


def test_rebrac_backs_up_the_distribution_of_the_smaller_mean() -> None:
    """Targets 0 + 0.9 / 2 = 0.45 (nine tenths on 1/2, a tenth on 0) and the end, 1."""
    learner = rebrac(critic_bc=0.0)
    constant(learner.target, SURE)
    constant(learner.critic, torch.zeros(2, 3))
    batch = transitions(2, LINE)
    batch |= {"reward": torch.tensor([0.0, 1.0]), "discount": torch.tensor([0.9, 0.0])}
    loss, mean = learner._critic_loss(batch)
    assert loss.item() == pytest.approx(2 * torch.tensor(3.0).log().item())
    assert mean.item() == pytest.approx(0.5)
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    constant(learner.critic, logits)
    p = logits.log_softmax(1)
    expected = -(0.1 * p[:, 0] + 0.9 * p[:, 1] + p[:, 2]).sum() / 2
    assert learner._critic_loss(batch)[0].item() == pytest.approx(expected.item(), rel=1e-5)
    # The penalty is taken from the reward: 0.9 (1/2 - 10 |a~ - a'|^2) is below the lowest atom.
    far = rebrac(critic_bc=10.0, target_noise=0.0)
    constant(far.target, SURE)
    constant(far.critic, logits)
    action = far.target_policy({"state": batch["next_obs/state"]})
    batch["next_action"] = action - action.sign()
    expected = -(p[:, 0] + p[:, 2]).sum() / 2
    assert far._critic_loss(batch)[0].item() == pytest.approx(expected.item(), rel=1e-5)


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


def hesitant_line(count: int = 40) -> tuple[Episodes, Tensor]:
    """From a distance to 0 in steps of 0.05, which is a success; now and then three steps back. The
    distance [N] of each step beside it."""
    states, actions, lengths = [], [], []
    for _ in range(count):
        place, back, length = 0.3 + 0.7 * torch.rand(()).item(), 0, 0
        while place > 0 and length < 60:
            back = 3 if back == 0 and torch.rand(()) < 0.08 else max(back - 1, 0)
            states.append(place)
            actions.append(-1.0 if back else 1.0)
            place, length = place - STEP * actions[-1], length + 1
        lengths.append(length)
    length, distance = torch.tensor(lengths), torch.tensor(states)
    last = torch.zeros(len(states), dtype=torch.bool)
    last[length.cumsum(0) - 1] = True
    steps = {"obs/state": distance[:, None], "action": torch.tensor(actions)[:, None]}
    steps |= {"reward": last.float(), "terminated": last, "truncated": ~last & last}
    final = {"state": torch.zeros(count, 1)}
    return Episodes(LINE, steps, length.cumsum(0) - length, length, final), distance


def test_categorical_values_are_progress_and_find_the_hesitation() -> None:
    torch.manual_seed(0)
    recorded, distance = hesitant_line()
    learner = rebrac(atoms=51, actor_lr=1e-3, critic_lr=1e-3, tau=0.05)
    rows = recorded_transitions(recorded, GAMMA)
    rows["next_action"] = rows["action"]
    learner.fit(rows)
    for _ in range(600):
        learner.update(take(rows, torch.randint(len(distance), (128,))))
    with torch.no_grad():
        found = value(learner, learner.critic({"state": rows["obs/state"]}, rows["action"]))
    assert cast(Any, spearmanr(found, -distance)).statistic > 0.9
    after = distance - STEP * rows["action"][:, 0]  # what the recorded action leaves to go
    true = GAMMA ** (after / STEP).ceil().clamp(min=0)
    config = Config(run="unused", delta=0.04, window=4)
    kept, expected = (keeps_progress(p, recorded.length, config) for p in (found, true))
    assert 0.1 < (~expected).float().mean() < 0.7
    assert (kept == expected).float().mean() > 0.85


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
    constant(learner.target, SURE)
    backup = learner._backup(torch.tensor([0.0, 1.0]), torch.tensor([0.9, 0.0]), state)
    torch.testing.assert_close(backup, torch.tensor([[0.1, 0.9, 0.0], [0.0, 0.0, 1.0]]))
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    constant(learner.critic, SURE)
    constant(learner.noise_critic, logits)
    p = logits.log_softmax(1)  # each learns the distribution of its own member
    assert learner._distil_loss(state).item() == pytest.approx(-(p[0, 2] + p[1, 1]).item())


def test_noise_is_free_within_the_shell() -> None:
    """Bound 2: |w|^2 / 2 is 4 (1 + 0) / 2 = 2 and 4 (0.01 + 0.01) / 2 = 0.04; the shell is 0.25."""
    learner = made(shell_weight=3.0, shell=0.25)
    u = torch.tensor([[1.0, 0.0], [0.1, -0.1]])
    torch.testing.assert_close(learner.beyond_shell(u), torch.tensor([1.75, 0.0]))
    state, n = {"state": torch.zeros(64, 2)}, 64
    without = made()
    without.load_state_dict(learner.state_dict())
    torch.manual_seed(1)
    free = without._actor_loss(state)[0]
    torch.manual_seed(1)
    drawn, _ = learner.actor.sample(state, learner.actor.sample_noise(n, True))
    penalty = 3 * learner.beyond_shell(drawn).mean()
    assert penalty > 0
    torch.manual_seed(1)
    torch.testing.assert_close(learner._actor_loss(state)[0], free + penalty)


def test_the_penalty_holds_the_noise_in_the_shell() -> None:
    """The value rises with every action; without a penalty the noise goes to the bound."""
    sizes = {}
    for weight in (0.0, 5.0):
        settings: dict[str, Any] = {
            "actor_lr": 3e-3,
            "critic_lr": 3e-3,
            "initial_temperature": 1e-4,
        }
        learner = made(shell_weight=weight, shell=0.25, atoms=21, **settings)
        for _ in range(150):
            action = torch.rand(64, 2) * 2 - 1
            reward = (action.sum(1) + 2) / 4
            learner.update(still(torch.zeros(64, 2), action, reward))
        state = {"state": torch.zeros(1, 2)}
        with torch.no_grad():
            u = learner.actor.act(state, {}, learner.actor.sample_noise(1))[0].squeeze(1)
        sizes[weight] = (2.0 * u).square().mean().item()
    assert sizes[5.0] < 0.5 < sizes[0.0], sizes


def rows_of(*numbers: int) -> Tensors:
    return {"reward": torch.tensor(numbers, dtype=torch.float32)}


def test_half_of_a_batch_is_new() -> None:
    node = node_of("buffers.newest.NewestReplayBuffer", share=0.5, newest=2)
    buffer = build(node, ReplayBuffer, capacity=8)
    assert isinstance(buffer, NewestReplayBuffer)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(2)
    buffer.add(rows_of(1))
    assert buffer.sample(4)["reward"].tolist() == [1, 1, 1, 1]
    buffer.add(rows_of(*range(2, 11)))  # 9 and 10 are where 1 and 2 were
    torch.manual_seed(0)
    found = buffer.sample(8000)["reward"]
    assert set(found.tolist()) == set(range(3, 11))
    new = found >= 9
    assert new.float().mean().item() == pytest.approx(0.5 + 0.5 * 2 / 8, abs=0.03)
    halves = new.float().view(2, -1).mean(1)
    assert abs(halves[0] - halves[1]).item() < 0.05, "they are spread over the batch"
