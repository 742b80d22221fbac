"""Everything that works on a policy of ours works on an adopted one: a tiny one, on env=two_gap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from embodied.commands.train import train
from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.policies.abilities import with_real_time_chunking
from embodied.policies.denoising_mdp.noisy_diffusion import NoisyDiffusion
from embodied.policies.lerobot.diffusion import LeRobotDiffusion
from embodied.policies.steering.dsrl import Dsrl
from embodied.viewer.launch import open_session
from tests.adopt.checkpoints import adopted, embodied, two_gap_checkpoint
from tests.tiers import usually

DEBUG = ["size=debug", "steps=60", "save_every=0", "eval.episodes=2", "device=cpu"]
SMALL = ["data.warmup_steps=24", "data.utd_ratio=0.2"]
CASES = {
    "dsrl": ["experiment=two_gap_dsrl", *SMALL],
    "shared": ["experiment=two_gap_dsrl_shared", *SMALL],
    "dsrl_na": ["experiment=two_gap_dsrl_na", "finetune.shared_noise=true", *SMALL],
    "features": ["experiment=two_gap_dsrl", "finetune=dsrl_features", *SMALL],
    "residual": ["experiment=two_gap_dsrl", "finetune=residual", *SMALL],
    "expo": ["experiment=two_gap_expo", "demo_episodes=null", "data.pretrain_steps=0", *SMALL],
    "dppo": ["experiment=two_gap_dppo", "env.num_envs=4", "finetune.steps=null", "finetune.last=1"],
    "ticket": ["experiment=fr3_detour_ticket", "env=two_gap", "env.num_envs=4"],
}


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adopted Diffusion policy that uses two observations and acts three steps."""
    folder = tmp_path_factory.mktemp("diffusion")
    return adopted(two_gap_checkpoint(folder / "lerobot"), folder / "base", "two_gap", "steps=2")


@pytest.fixture(scope="module")
def act(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adopted ACT policy."""
    base = two_gap_checkpoint(tmp_path_factory.mktemp("act") / "lerobot", "act_numbers")
    return adopted(base, base.with_name("base"), "two_gap")


def evaluated(run: Path, *words: str) -> None:
    embodied("eval", str(run), "episodes=2", "num_envs=2", *words)


@pytest.mark.parametrize("name", usually(["dsrl", "dppo", "expo"], CASES))
def test_finetuned_by(name: str, diffusion: Path, tmp_path: Path) -> None:
    out = tmp_path / name
    train([*CASES[name], *DEBUG, f"init={diffusion}", f"out={out}", "copy_base_mb=0"])
    saved = checkpoint.find(out)
    if name != "dppo":
        assert (saved / "references.json").exists() == (name != "expo")  # EXPO trains the base too
        state = checkpoint.load_state(out, "learner")["module"]
        assert not any("base.diffusion" in key for key in state) or name == "expo"
    evaluated(out)
    with pytest.raises(ConfigError, match=r"LeRobot has no policy like|finetune.last=2 for one"):
        embodied("export", str(out), "--lerobot", str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_resumed_run_ends_as_one_that_was_not_stopped(diffusion: Path, tmp_path: Path) -> None:
    """Without its base in the checkpoint, bit for bit."""
    words = [*CASES["dsrl_na"], *DEBUG, f"init={diffusion}", "copy_base_mb=0"]
    whole, half = tmp_path / "whole", tmp_path / "half"
    train([*words, f"out={whole}"])
    train([*words, f"out={half}", "steps=40"])
    train([f"resume={half}", "steps=60"])
    first, second = (checkpoint.load_policy(run).state_dict() for run in (whole, half))
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_real_time_chunking_other_sampler_steps_and_the_viewer(diffusion: Path) -> None:
    assert open_session(diffusion) is not None
    evaluated(diffusion, "policy=real_time_chunking", "policy.delay=1", "execute=2")
    evaluated(diffusion, "policy.steps=3")


def test_what_can_help_it(diffusion: Path, tmp_path: Path) -> None:
    """Other steps of its sampler are among what is tried."""
    few = ["episodes=2", "num_envs=1", "noises=2", f"out={tmp_path}"]
    embodied("diagnose", str(diffusion), *few)
    found = yaml.safe_load((tmp_path / "diagnosis.yaml").read_text())["diagnosis"]
    assert found["noise"] == "chosen"


def test_best_of_n_without_a_critic_is_refused(diffusion: Path) -> None:
    with pytest.raises(ConfigError, match=r"no learner, and so no critic .* finetune=dsrl_na"):
        evaluated(diffusion, "policy=best_of_n")


@pytest.mark.parametrize("name", ["dsrl_na", "expo"])
def test_demonstrations_are_mixed_in(name: str, diffusion: Path, tmp_path: Path) -> None:
    """For a base that takes several past observations, they are read from the demonstrations."""
    demos, out = tmp_path / "demos", tmp_path / "run"
    embodied("demos", "collect", "env=two_gap", "episodes=4", f"out={demos}")
    words = [*CASES[name], *DEBUG, f"init={diffusion}", f"demos={demos}", f"out={out}"]
    train([*words, "data.pretrain_steps=2"])
    evaluated(out)


def test_reinflow_names_what_trains_a_diffusion_policy(diffusion: Path, tmp_path: Path) -> None:
    words = ["experiment=two_gap_reinflow", *DEBUG, f"init={diffusion}", f"out={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match="not LeRobotDiffusion; finetune=dppo"):
        train(words)


def test_dppo_of_all_steps_goes_back_to_lerobot(diffusion: Path, tmp_path: Path) -> None:
    """The whole way: adopted, trained, given back, adopted again; and it acts the same."""
    words = ["experiment=two_gap_dppo", "finetune.steps=null", "finetune.last=2", "env.num_envs=4"]
    train([*words, *DEBUG, f"init={diffusion}", f"out={tmp_path / 'run'}"])
    embodied("export", str(tmp_path / "run"), "--lerobot", str(tmp_path / "back"))
    again = checkpoint.load_policy(adopted(tmp_path / "back", tmp_path / "again", "two_gap"))
    own, base = (checkpoint.load_policy(run) for run in (tmp_path / "run", diffusion))
    obs, noise = (
        {"state": torch.rand(4, 2), "history/state": torch.rand(4, 1, 2)},
        torch.randn(4, 16),
    )
    found, expected, before = (policy.act(obs, {}, noise)[0] for policy in (again, own, base))
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, before, atol=1e-4), "it has learned something"
    with pytest.raises(ConfigError, match="exists already"):
        embodied("export", str(tmp_path / "run"), "--lerobot", str(tmp_path / "back"))


@pytest.mark.parametrize("name", ["dsrl", "dsrl_na", "features"])
def test_a_policy_without_noise_cannot_be_steered(name: str, act: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train([*CASES[name], *DEBUG, f"init={act}", f"out={tmp_path / name}"])
    assert "finetune=residual and finetune=expo" in str(caught.value)


@pytest.mark.parametrize("name", ["residual", "expo"])
def test_a_policy_without_noise_can_be_corrected(name: str, act: Path, tmp_path: Path) -> None:
    train([*CASES[name], *DEBUG, f"init={act}", f"out={tmp_path / name}"])
    evaluated(tmp_path / name)


def test_a_steered_checkpoint_is_small(tmp_path: Path) -> None:
    """A U-Net of 16.6 million parameters: at the default settings, below 5 MB."""
    folder = two_gap_checkpoint(
        tmp_path / "lerobot", down_dims=[128, 256, 512], horizon=16, n_action_steps=8
    )
    base = checkpoint.load_policy(adopted(folder, tmp_path / "base", "two_gap", "steps=1"))
    assert isinstance(base, LeRobotDiffusion)
    inner = {"_target_": "embodied.policies.gaussian.Gaussian"}
    policy = Dsrl.wrap(base, {"_target_": "embodied.policies.steering.dsrl.Dsrl"}, inner)
    saved = checkpoint.save(tmp_path / "steered" / "checkpoints" / "00000001", policy, 1)
    assert (checkpoint.find(tmp_path / "base") / "policy.safetensors").stat().st_size > 4e7
    assert sum(file.stat().st_size for file in saved.iterdir()) < 5e6
    assert json.loads((saved / "references.json").read_text())[0]["part"] == "base"
    assert isinstance(checkpoint.load_policy(saved), Dsrl)


def test_shared_noise_is_that_of_one_step(diffusion: Path) -> None:
    base = checkpoint.load_policy(diffusion)
    inner = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [8]}
    node = {"_target_": "embodied.policies.steering.dsrl.Dsrl", "bound": 2.0, "shared_noise": True}
    policy = Dsrl.wrap(base, node, inner)
    assert policy.inner.spec.act.size == 2
    u = torch.rand(3, 2)
    noise = policy.base_noise(u)
    assert noise.shape == (3, 8, 2)
    assert torch.equal(noise, (2 * u)[:, None].expand(3, 8, 2))


def test_guidance_joins_the_previous_chunk(diffusion: Path) -> None:
    """The guided steps of the new chunk are nearer to the old plan than without guidance."""
    policy = checkpoint.load_policy(diffusion)
    guided = with_real_time_chunking(policy, "guided")
    obs, noise = {"state": torch.full((16, 2), 0.4)}, torch.randn(16, 8, 2)
    plan = policy.act(obs, {}, torch.randn(16, 8, 2))[0]
    carry = guided.initial(16) | {
        "plan": plan,
        "executed_steps": torch.ones(16, dtype=torch.int64),
        "delay": torch.ones(16, dtype=torch.int64),
    }
    free = policy.act(obs, {}, noise)[0]
    seen, carry = guided.observe(obs, carry, noise)
    made = guided.act(seen, carry, noise)[0]
    assert torch.equal(made[:, 0], plan[:, 1])  # frozen: the delay
    assert (made[:, 1] - plan[:, 2]).abs().mean() < (free[:, 1] - plan[:, 2]).abs().mean()


def test_the_executed_actions_are_those_after_the_oldest_observation(diffusion: Path) -> None:
    """Of denoising as an MDP; without noise it is the base bit for bit."""
    base = checkpoint.load_policy(diffusion)
    target = f"{NoisyDiffusion.__module__}.NoisyDiffusion"
    policy = NoisyDiffusion.wrap(base, {"_target_": target, "last": 1})
    assert policy.executed(4) == slice(2, 6)
    obs = {"state": torch.rand(4, 2), "history/state": torch.rand(4, 1, 2)}
    noise = policy.sample_noise(4)
    plain = base.act(obs, {}, noise[:, : policy.size])[0]
    assert torch.equal(policy.act(obs, {}, noise)[0], plain)
