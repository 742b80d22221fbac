"""A trained policy as a demonstrator: as it is, with noise, at random."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied.core import checkpoint
from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec, SpecMismatch
from embodied.datasets.collect import CollectConfig, collect
from embodied.datasets.lerobot.reader import DatasetError, read_episodes
from embodied.policies.scripted.checkpoint import CheckpointDemonstrator

SPEC = Spec({"state": Leaf((2,))}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


def saved(folder: Path, kind: str = "gaussian.Gaussian", spec: Spec = SPEC, chunk: int = 1) -> Path:
    torch.manual_seed(0)
    node = {"_target_": f"embodied.policies.{kind}"}
    if chunk > 1:
        node |= {"chunk": chunk, "width": 16, "depth": 1}
    checkpoint.save(folder / "checkpoints" / "00000001", build(node, Policy, spec=spec), 1)
    return folder


def trained(run: Path, spec: Spec = SPEC, **settings: object) -> CheckpointDemonstrator:
    node = {
        "_target_": "embodied.policies.scripted.checkpoint.CheckpointDemonstrator",
        "run": str(run),
        **settings,
    }
    return build(node, Policy, spec=spec)


def acted(
    policy: CheckpointDemonstrator, n: int = 4000
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    obs, noise = {"state": torch.randn(n, 2)}, policy.sample_noise(n)
    mean = policy.base.act(obs, {}, torch.zeros(n, 2))[0]
    return policy.act(obs, {}, noise)[0], mean, noise


def test_without_noise_it_is_the_policy(tmp_path: Path) -> None:
    action, mean, _ = acted(trained(saved(tmp_path)))
    assert torch.equal(action, mean)


def test_noise_has_its_deviation_and_its_bounds(tmp_path: Path) -> None:
    action, mean, _ = acted(trained(saved(tmp_path), noise=0.1))
    inside = action.abs() < 1
    assert (action - mean)[inside].std().item() == pytest.approx(0.1, rel=0.05)
    action, _, _ = acted(trained(saved(tmp_path), noise=3.0))
    assert action.abs().max().item() == 1


def test_the_share_of_random_decisions(tmp_path: Path) -> None:
    action, mean, _ = acted(trained(saved(tmp_path), random=0.25))
    other = (action != mean).flatten(1).any(1)
    assert other.float().mean().item() == pytest.approx(0.25, abs=0.03)
    lost = action[other].flatten()
    assert lost.mean().abs().item() < 0.05 and lost.std().item() == pytest.approx(3**-0.5, rel=0.05)


def test_exploring_as_it_did(tmp_path: Path) -> None:
    policy = trained(saved(tmp_path), explore=True)
    noise = policy.sample_noise(8)
    obs = {"state": torch.randn(8, 2)}
    expected = policy.base.act(obs, {}, noise[:, :2])[0]
    assert torch.equal(policy.act(obs, {}, noise)[0], expected)
    assert (noise[:, :2] != 0).all()


def test_a_chunk_of_a_generative_policy(tmp_path: Path) -> None:
    policy = trained(saved(tmp_path, "generative.flow.Flow", chunk=3), noise=0.1)
    noise = policy.sample_noise(5)
    action, _ = policy.act({"state": torch.randn(5, 2)}, {}, noise)
    assert action.shape == (5, 3, 2)
    again, _ = policy.act({"state": torch.randn(5, 2)}, {}, noise)
    assert action.shape == again.shape and not torch.equal(action, again)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    other = Spec({"state": Leaf((3,))}, SPEC.act, dt=0.1)
    with pytest.raises(SpecMismatch):
        trained(saved(tmp_path), other)
    symbols = Spec({"state": Leaf((2,))}, Leaf((), "int64", low=0, high=3), dt=0.1)
    run = saved(tmp_path / "symbols", "categorical.Categorical", symbols)
    with pytest.raises(ConfigError, match="continuous"):
        trained(run, symbols, noise=0.1)


def test_collecting_from_a_run(tmp_path: Path) -> None:
    from tests.toy_envs import Reach

    run = saved(tmp_path / "run", spec=Reach(1).spec)
    settings = CollectConfig(
        env={"_target_": "tests.toy_envs.Reach"},
        demonstrator={
            "_target_": "embodied.policies.scripted.checkpoint.CheckpointDemonstrator",
            "run": str(run),
            "random": 0.5,
        },
        episodes=6,
        out=str(tmp_path / "set"),
        num_envs=3,
        success_only=False,
    )
    from embodied.core.build import allow

    allow("tests")
    assert collect(settings, lambda kept, played: None) == (6, 6)
    episodes = read_episodes(tmp_path / "set")
    assert len(episodes) == 6 and episodes.info[0]["random"] == 0.5


def test_other_settings_of_the_policy(tmp_path: Path) -> None:
    run = saved(tmp_path, "generative.flow.Flow", chunk=3)
    usual, fine = trained(run), trained(run, settings={"steps": 16})
    saved_policy = checkpoint.load_policy(run)
    expected = checkpoint.with_settings(saved_policy, {"steps": 16}, run)
    noise, obs = usual.sample_noise(5), {"state": torch.randn(5, 2)}
    own = usual._own(noise)
    assert torch.equal(fine.act(obs, {}, noise)[0], expected.act(obs, {}, own)[0])
    assert not torch.equal(fine.act(obs, {}, noise)[0], usual.act(obs, {}, noise)[0])
    with pytest.raises(ConfigError, match="do not fit"):
        trained(run, settings={"width": 8})


def test_collecting_with_a_new_plan_in_every_step(tmp_path: Path) -> None:
    from embodied.core.build import allow
    from tests.toy_envs import Reach

    allow("tests")
    run = saved(tmp_path / "run", "generative.flow.Flow", Reach(1).spec, chunk=3)
    node = {
        "_target_": "embodied.policies.scripted.checkpoint.CheckpointDemonstrator",
        "run": str(run),
        "settings": {"steps": 2},
    }

    def first(name: str, execute: int | None) -> torch.Tensor:
        settings = CollectConfig(
            env={"_target_": "tests.toy_envs.Reach"},
            demonstrator=node,
            episodes=2,
            out=str(tmp_path / name),
            num_envs=2,
            success_only=False,
            execute=execute,
        )
        collect(settings, lambda kept, played: None)
        return read_episodes(tmp_path / name).episode(0)["action"]

    whole, every = first("whole", None), first("every", 1)
    assert torch.equal(whole, first("all", 3))
    assert torch.equal(whole[0], every[0]) and not torch.equal(whole[1], every[1])
    for wrong in (0, 4):
        with pytest.raises(ConfigError, match=r"1\.\.3"):
            first("wrong", wrong)
    with pytest.raises(DatasetError, match="other settings"):
        first("every", 2)
