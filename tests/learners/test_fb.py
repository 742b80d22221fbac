"""Forward-backward representations: the losses by hand, a chain's exact measure, prompts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import read_episodes
from embodied.datasets.lerobot.writer import EpisodeWriter
from embodied.evaluation import prompts
from embodied.learners.offline.fb import Fb
from embodied.policies.prompted import Prompted
from tests.builders import exit_of, make_learner, make_policy, recorded

PLAIN = Spec({"state": Leaf((1,), names=("x",))}, Leaf((1,), low=-1.0, high=1.0), dt=0.1)
SPEC = PLAIN.with_obs(eye=Leaf((2,)))


def policy_of(spec: Spec = PLAIN, **settings: Any) -> Prompted:
    torch.manual_seed(0)
    given = {"hidden": [32], "backward": [32], "dimension": 4, **settings}
    return make_policy("prompted.Prompted", spec, **given)


def learner_of(policy: Prompted | None = None, **settings: Any) -> Fb:
    given = {"hidden": [32], "batch_size": 3, **settings}
    return make_learner("offline.fb.Fb", policy or policy_of(), **given)


def walk(count: int, generator: torch.Generator) -> Tensors:
    """Steps of a point on the line from -1 to 1, which stays there; rewards at the right end."""
    x = 2 * torch.rand(count, 1, generator=generator) - 1
    action = 2 * torch.rand(count, 1, generator=generator) - 1
    following = (x + 0.3 * action).clamp(-1, 1)
    return {
        "obs/state": x,
        "action": action,
        "next_obs/state": following,
        "reward": (following[:, 0] > 0.7).float(),
        "discount": torch.full((count,), 0.8),
    }


class Table(torch.nn.Module):
    """A network that answers with a table, whatever it is asked."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, *_: Any) -> Tensor:
        return self.values


def test_the_losses_by_hand() -> None:
    """Two F and three transitions in two dimensions."""
    learner: Any = learner_of(policy_of(dimension=2), gamma=0.5, terminations=True)
    f = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [[2.0, 0.0], [0.0, 0.0], [1.0, 0.0]]])
    b = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]])
    learner.visits, learner.target_visits = Table(f), Table(f)
    learner.policy.backward = learner.target_backward = Table(b)
    batch = walk(3, torch.Generator().manual_seed(0))
    discount = batch["discount"] = torch.tensor([0.5, 0.5, 0.0])
    measure, ortho = learner._measure_loss(batch, b)
    m = torch.einsum("hid,jd->hij", f, b)
    apart, own = ~torch.eye(3, dtype=torch.bool), m.diagonal(dim1=1, dim2=2)
    square = (m - discount[:, None] * m.amin(0)).square()[:, apart]
    expected = (square.mean(1) / 2 - own.mean(1)).sum()
    torch.testing.assert_close(measure, expected)
    # B_i . B_j: 2 on the diagonal; 0, 0, -2 off it, twice each.
    assert ortho.item() == pytest.approx((4 + 4) / 6 - 2 * 2)
    learner.config = type(learner.config)(terminations=False, gamma=0.5)
    went_on, _ = learner._measure_loss(batch, b)
    square = (m - 0.5 * m.amin(0)).square()[:, apart]
    torch.testing.assert_close(went_on, (square.mean(1) / 2 - own.mean(1)).sum())
    torch.testing.assert_close(learner._actor_loss(batch, b), -(f * b).sum(2).amin(0).mean())


def test_prompts_are_on_the_sphere_and_half_are_states() -> None:
    learner = learner_of()
    states = {"state": torch.linspace(-1, 1, 400)[:, None]}
    z = learner.prompts(states)
    torch.testing.assert_close(z.norm(dim=1), torch.full((400,), 2.0))
    known = learner.policy.embed(states)
    is_state = (torch.cdist(z, known) < 1e-3).any(1)
    assert 0.4 < is_state.float().mean() < 0.6


def test_the_policy_follows_the_direction_of_its_prompt() -> None:
    policy = policy_of()
    obs, noise = {"state": torch.rand(5, 1)}, torch.zeros(5, 1)
    policy.prompt(torch.tensor([1.0, 2.0, 0.0, 0.0]))
    one = policy.act(obs, {}, noise)[0]
    policy.prompt(torch.tensor([2.0, 4.0, 0.0, 0.0]))
    torch.testing.assert_close(policy.act(obs, {}, noise)[0], one)
    z = torch.tensor([1.0, 2.0, 0.0, 0.0]) * 2 / math.sqrt(5)
    torch.testing.assert_close(one[:, 0], policy(obs, z.expand(5, -1)))


def test_b_sees_the_chosen_elements() -> None:
    policy = policy_of(SPEC, elements=["x"])
    one = {"state": torch.ones(1, 1), "eye": torch.zeros(1, 2)}
    assert torch.equal(policy.embed(one), policy.embed({**one, "eye": torch.ones(1, 2)}))
    with pytest.raises(ConfigError, match='no element "y"'):
        policy_of(SPEC, elements=["y"])


@pytest.fixture(scope="module")
def trained() -> Fb:
    policy = policy_of(hidden=[64], backward=[64], dimension=8)
    given = {"hidden": [64], "batch_size": 128, "lr": 2e-3, "actor_lr": 2e-3, "gamma": 0.8}
    learner = learner_of(policy, **given)
    generator = torch.Generator().manual_seed(1)
    learner.fit(walk(2000, generator))
    torch.manual_seed(0)
    for _ in range(600):
        learner.update(walk(128, generator))
    return learner


def ends(policy: Prompted) -> Tensor:
    """Where nine points are after 20 steps."""
    x = torch.linspace(-1, 1, 9)[:, None]
    for _ in range(20):
        action = policy.act({"state": x}, {}, torch.zeros(9, 1))[0][:, 0]
        x = (x + 0.3 * action).clamp(-1, 1)
    return x.detach()[:, 0]


def test_one_policy_maximises_other_rewards(trained: Fb) -> None:
    """Its own reward (the right end) without a prompt, and the left end and the middle as goals."""
    policy = trained.policy
    assert (ends(policy) > 0.6).all()
    for goal in (-0.9, 0.0):
        policy.prompt(prompts.of_states(policy, {"state": torch.tensor([[goal]])}))
        assert ((ends(policy) - goal).abs() < 0.35).all(), goal


def dataset(folder: Path) -> str:
    """Six episodes of ten steps on the line."""
    generator = torch.Generator().manual_seed(5)
    with EpisodeWriter(folder, PLAIN) as writer:
        for _ in range(6):
            action = 2 * torch.rand(10, 1, generator=generator) - 1
            x = torch.cat([torch.zeros(1, 1), 0.3 * action.cumsum(0)])
            reward = (x[1:, 0] > 0.2).float()
            last = torch.arange(10) == 9
            writer.add(recorded({"state": x}, action, reward=reward, truncated=last), "walk", {})
    return str(folder)


def test_the_command(tmp_path: Path, trained: Fb, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt is written as a run; its vector is the mean of B by hand."""
    demos = dataset(tmp_path / "demos")
    source = tmp_path / "run"
    checkpoint.save(source / "checkpoints" / "00000600", trained.policy, 600)
    (source / "run.yaml").write_text("{format: 1, name: run, out: run}\n")

    def prompted(name: str, *words: str) -> Tensor:
        assert exit_of("prompt", source, *words, f"out={tmp_path / name}") == 0
        found = checkpoint.load_policy(tmp_path / name)
        assert isinstance(found, Prompted)
        assert checkpoint.read_about(tmp_path / name)["step"] == 600
        return found.u

    episodes = prompts.states_of(PLAIN, read_episodes(demos))
    known = trained.policy.embed(episodes).detach()
    torch.testing.assert_close(prompted("all", f"demos={demos}"), known.mean(0))
    last = trained.policy.embed(prompts.states_of(PLAIN, read_episodes(demos), 1)).detach()
    assert len(last) == 6
    torch.testing.assert_close(prompted("last", f"demos={demos}", "last=1"), last.mean(0))
    u = prompted("goal", "goal={x: 0.3}", f"among={demos}", "nearest=4")
    nearest = (episodes["state"][:, 0] - 0.3).abs().argsort()[:4]
    torch.testing.assert_close(u, known[nearest].mean(0))
    capsys.readouterr()
    prompted("reward", f"reward={demos}")
    assert "60 steps" in capsys.readouterr().out
    for words, says in (
        (("goal={x: 1}",), "among=DIR"),
        (("goal={y: 1}", f"among={demos}"), 'no element "y"'),
    ):
        assert exit_of("prompt", source, *words, f"out={tmp_path / 'b'}") == 2
        assert says in capsys.readouterr().err


class Colours:
    """Pictures as their mean colour, a unit vector."""

    name, size, side = "colours", 3, 2

    def images(self, pictures: Tensor) -> Tensor:
        return torch.nn.functional.normalize(pictures.float().mean((1, 2)), dim=1)

    def texts(self, sentences: Any) -> Tensor:
        raise NotImplementedError


def test_frames_are_projected_and_strange_ones_left_out() -> None:
    shade = torch.linspace(0, 250, 20).repeat(2)
    recorded = torch.stack([shade, 250 - shade, torch.zeros(40)], 1).to(torch.uint8)
    recorded = recorded[:, None, None].expand(-1, 2, 2, -1)
    blue = torch.tensor([0, 0, 255], dtype=torch.uint8).expand(1, 2, 2, 3)
    episode = torch.arange(40) // 20
    place, unlike = prompts.projected(
        torch.cat([recorded[[3, 17]], blue]), recorded, episode, Colours()
    )
    assert (place % 20).tolist() == [3, 17] and unlike == 1
    with pytest.raises(ConfigError, match="unlike what was recorded"):
        prompts.projected(blue, recorded, episode, Colours())
