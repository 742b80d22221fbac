"""The discrete policy against torch's own distribution, and by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Categorical as Theirs

from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes
from embodied.datasets.transitions import Dataset, chunks
from embodied.learners.imitation.behavior_cloning import BehaviorCloning
from embodied.learners.imitation.behavior_cloning import Config as ImitateConfig
from embodied.learners.learner import RunPlan
from embodied.policies.categorical import Categorical, Config

CELLS = Leaf((2, 2), "uint8", 0, 3, unit="symbol")
SPEC = Spec({"cells": CELLS}, Leaf((), "int64", 0, 4), dt=1.0, text="press the right key")


def cells(n: int) -> dict[str, torch.Tensor]:
    return {"cells": torch.randint(4, (n, 2, 2)).to(torch.uint8)}


@pytest.fixture
def policy() -> Categorical:
    torch.manual_seed(0)
    built = Categorical(Config(chunk=2, hidden=(16,)), SPEC)
    head = built.net[-1]
    assert isinstance(head, nn.Linear)
    nn.init.normal_(head.weight)  # far from uniform
    return built


def test_probabilities_are_those_of_torch(policy: Categorical) -> None:
    obs = cells(30)
    action = torch.randint(5, (30, 2))
    theirs = Theirs(logits=policy.net(policy.encoder(obs)).view(30, 2, 5))
    torch.testing.assert_close(policy.log_prob(obs, action), theirs.log_prob(action).sum(1))
    torch.testing.assert_close(policy.entropy(obs), theirs.entropy().sum(1))


def test_gumbel_noise_draws_from_the_distribution(policy: Categorical) -> None:
    one = {"cells": cells(1)["cells"].expand(40_000, 2, 2)}
    action, _ = policy.act(one, {}, policy.sample_noise(40_000, explore=True))
    probability = policy(one)[0].exp()
    for step in range(2):
        share = torch.bincount(action[:, step], minlength=5) / 40_000
        assert (share - probability[step]).abs().max() < 0.012  # over four deviations
    best, _ = policy.act(one, {}, policy.sample_noise(40_000))
    assert (best == probability.argmax(1)).all()


def test_who_is_sampled_draws_in_evaluation_too() -> None:
    policy = Categorical(Config(hidden=(4,), sampled=True), SPEC)
    assert policy.sample_noise(5).abs().min() > 0 and policy.sample_noise(5).shape == (5, 1, 5)


def test_loss_by_hand(policy: Categorical) -> None:
    for parameter in policy.parameters():
        nn.init.zeros_(parameter)
    head = policy.net[-1]
    assert isinstance(head, nn.Linear)
    head.bias.data = torch.tensor([math.log(4), 0, 0, 0, 0, 0, 0, 0, 0, math.log(6)])
    batch = {
        "obs/cells": cells(3)["cells"],
        "action": torch.tensor([[0, 4], [1, 0], [0, 2]]),
        "valid": torch.tensor([[True, True], [True, False], [False, False]]),
    }
    # First action: weights 4 1 1 1 1 of 8; second: 1 1 1 1 6 of 10.
    expected = [(math.log(8 / 4) + math.log(10 / 6)) / 2, math.log(8), 0.0]
    assert policy.loss(batch).tolist() == pytest.approx(expected, rel=1e-5)


def test_equally_likely_at_the_start_if_asked() -> None:
    policy = Categorical(Config(head=0.0), SPEC)
    assert policy.entropy(cells(4)).tolist() == pytest.approx([math.log(5)] * 4)


def test_continuous_actions_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs discrete actions"):
        Categorical(Config(), SPEC.with_act(Leaf((2,), low=-1.0, high=1.0)))


def test_discrete_demonstrations_go_to_disk_and_are_imitated(tmp_path: Path) -> None:
    """Recorded as int64, read back the same, and learnt without a mistake."""
    torch.manual_seed(0)
    with EpisodeWriter(tmp_path, SPEC) as writer:
        for _ in range(8):
            seen = torch.randint(4, (41, 2, 2)).to(torch.uint8)
            right = torch.where(seen[:40, 0, 0] == 3, 4, seen[:40, 1, 1].long())
            no = torch.zeros(40, dtype=torch.bool)
            late = torch.arange(40) == 39
            steps = {"obs/cells": seen[:40], "next_obs/cells": seen[40], "action": right}
            flags = {"reward": torch.zeros(40), "terminated": no, "truncated": late}
            writer.add(steps | flags)
    episodes = read_episodes(tmp_path)
    assert episodes.spec == SPEC and episodes.spec.obs["cells"].is_symbol
    assert episodes.steps["action"].dtype == torch.int64
    assert episodes.steps["action"].shape == (320,)
    assert episodes.steps["obs/cells"].dtype == torch.uint8
    rows = Dataset(chunks(episodes, 1))
    assert rows.rows["action"].shape == (320, 1)
    learner = BehaviorCloning(
        ImitateConfig(batch_size=64, lr=1e-2), Categorical(Config(), SPEC), run=RunPlan(150)
    )
    learner.fit(rows.rows)
    for _ in range(150):
        learner.update(rows.sample(64))
    obs = cells(500)
    right = torch.where(obs["cells"][:, 0, 0] == 3, 4, obs["cells"][:, 1, 1].long())
    chosen, _ = learner.policy.act(obs, {}, learner.policy.sample_noise(500))
    assert (chosen[:, 0] == right).float().mean() > 0.98
