"""Forward-backward representations: losses by hand, prompts; the parts of GR-RL."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.commands.train import train
from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import read_episodes
from embodied.datasets.lerobot.writer import EpisodeWriter
from embodied.evaluation import prompts
from embodied.learners.offline.critic_progress import Config, CriticProgress, keeps_progress, value
from embodied.learners.offline.fb import Fb
from embodied.learners.offline.rebrac import Rebrac
from embodied.policies.prompted import Prompted
from embodied.training.logger import read_metrics
from tests.builders import LINE, exit_of, make_learner, make_policy, node_of, recorded, transitions
from tests.learners.finetune.test_steering import made
from tests.learners.parts import constant

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
