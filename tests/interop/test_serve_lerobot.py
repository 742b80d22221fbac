"""LeRobot's SmolVLA, pi0 and pi0.5, tiny and with random weights, behind our server: checkpoints
that LeRobot wrote, loaded by LeRobot; their noise is an argument, and DSRL chooses it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.interop import need

need("lerobot", "transformers", "websockets")

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.factory import (  # noqa: E402
    get_policy_class,
    make_policy_config,
    make_pre_post_processors,
)

from embodied.commands.train import train  # noqa: E402
from embodied.core import checkpoint  # noqa: E402
from embodied.core.actor import Actor  # noqa: E402
from embodied.core.build import ConfigError, allow, build  # noqa: E402
from embodied.core.policy import Policy  # noqa: E402
from embodied.core.spec import Leaf, Spec, SpecMismatch  # noqa: E402
from embodied.core.tensors import Tensors  # noqa: E402
from embodied.policies.remote.connection import Connection  # noqa: E402
from embodied.policies.steering.dsrl import Dsrl  # noqa: E402
from embodied.serve.openpi_wrapper import weights_hash  # noqa: E402
from embodied.serve.protocol import OURS  # noqa: E402
from embodied.serve.server import Server  # noqa: E402
from scripts.serve_lerobot import LeRobotService, load  # noqa: E402
from tests.interop.tiny_vlas import CAMERAS, STATE, TASK, small_pi, write_pi, write_smolvla  # noqa: E402
from tests.interop.write_lerobot_checkpoints import cases, write  # noqa: E402

KINDS = ["smolvla", "pi0", "pi05"]
INNER = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [16]}
MAPPING = {"obs": {"state": STATE, **CAMERAS}, "action": {"low": [-3.0] * 4, "high": [3.0] * 4}}
PICTURE = Leaf((64, 64, 3), dtype="uint8", low=0.0, high=255.0)
SPEC = Spec(  # of env=fr3_lift_pixels, without what only critics see
    {"state": Leaf((21,)), "front": PICTURE, "wrist": PICTURE},
    Leaf((4,), low=-1.0, high=1.0),
    dt=0.05,
)
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "serve_lerobot.py"


@pytest.fixture(scope="module")
def smolvla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smolvla(tmp_path_factory.mktemp("smolvla"))


@pytest.fixture(scope="module", params=KINDS)
def service(
    request: pytest.FixtureRequest, smolvla: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LeRobotService]:
    if request.param == "smolvla":
        yield LeRobotService(*load(str(smolvla), "cpu"), dt=0.05, text=TASK)
        return
    folder = tmp_path_factory.mktemp(request.param)
    with small_pi(request.param, folder / "words"):
        parts = load(str(write_pi(request.param, folder)), "cpu")
    yield LeRobotService(*parts, dt=0.05, text=TASK)


@pytest.fixture(scope="module")
def server(service: LeRobotService) -> Iterator[Server]:
    allow("embodied.policies.remote")
    with Server(service, port=0) as running:
        yield running


@pytest.fixture(scope="module")
def remote(server: Server) -> Policy:
    return asked(server.url)


def asked(url: str, spec: Spec = SPEC) -> Policy:
    node = {"_target_": "embodied.policies.remote.policy.RemotePolicy", "url": url}
    return build({**node, "mapping": MAPPING, "wait": 0.0}, Policy, spec=spec)


def observations(n: int) -> Tensors:
    torch.manual_seed(1)
    return {name: leaf.sample(n) for name, leaf in SPEC.obs.items()}


def test_same_noise_gives_lerobots_chunk(service: LeRobotService, remote: Policy) -> None:
    """What arrives here is what LeRobot predicts, in units of here."""
    obs, noise = observations(2), remote.sample_noise(2)
    assert noise.shape == (2, 10, 32)
    first, second = (remote.act(obs, {}, noise)[0] for _ in range(2))
    other = remote.act(obs, {}, remote.sample_noise(2))[0]
    assert first.shape == (2, 10, 4) and torch.equal(first, second)
    assert not torch.allclose(first, other)
    given = {STATE: obs["state"], "task": [TASK] * 2}
    given |= {c: obs[k].permute(0, 3, 1, 2).float() / 255 for k, c in CAMERAS.items()}
    service.policy.reset()
    theirs = service.post(service.policy.predict_action_chunk(service.pre(given), noise=noise))
    assert torch.allclose(first, theirs / 3, atol=1e-6)


def steered(url: str, folder: Path) -> None:
    """DSRL at debug size, in simulation, from two cameras."""
    file = folder / "names.yaml"
    file.write_text(yaml.safe_dump(MAPPING))
    words = ["experiment=fr3_lift_pixels_dsrl", "finetune=dsrl", "finetune.shared_noise=true"]
    words += [f"init={url}", f"mapping={file}", f"out={folder / 'run'}"]
    small = ["size=debug", "steps=48", "data.warmup_steps=24", "env.num_envs=2", "device=cpu"]
    train([*words, *small, "eval.episodes=1", "eval.num_envs=1", "save_every=0"])
    weights = checkpoint.find(folder / "run") / "policy.safetensors"
    assert weights.stat().st_size < 5e6


def test_dsrl_end_to_end(server: Server, tmp_path: Path) -> None:
    steered(server.url, tmp_path)


def test_another_control_period_is_refused(server: Server) -> None:
    spec = Spec(SPEC.obs, SPEC.act, dt=0.1)
    with pytest.raises(SpecMismatch, match=r"0.1 s here and 0.05 s at ws://.* --fps 10"):
        asked(server.url, spec)


def test_from_the_command_line(smolvla: Path, tmp_path: Path) -> None:
    """In a process of its own, as docs/lerobot.md says."""
    words = [str(smolvla), "--port", "0", "--fps", "20", "--task", TASK, "--device", "cpu"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *words], stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        said = next((x for x in process.stdout if x.startswith("serving")), "")
        try:
            assert said.startswith("serving smolvla at ws://127.0.0.1:")
            allow("embodied.policies.remote")
            steered(said.split()[3].rstrip(";"), tmp_path)
        finally:
            process.terminate()


def test_another_checkpoint_is_refused(smolvla: Path, tmp_path: Path) -> None:
    """The hash is of the weights and the processors: a steered run accepts no other base."""
    copied = Path(shutil.copytree(smolvla, tmp_path / "policy"))
    hashes = [weights_hash(str(folder)) for folder in (smolvla, copied)]
    assert hashes[0] == hashes[1]
    service = LeRobotService(*load(str(copied), "cpu"), dt=0.05, text=TASK, weights=hashes[0])
    allow("embodied.policies.remote")
    with Server(service, port=0) as running:
        node = {"_target_": "embodied.policies.steering.dsrl.Dsrl", "shared_noise": True}
        saved = checkpoint.save(tmp_path / "0", Dsrl.wrap(asked(running.url), node, INNER), 0)
        assert checkpoint.load_policy(saved).node["base"]["policy_hash"] == hashes[0]
    weights = load_file(copied / "model.safetensors")
    save_file({k: 1.3 * v for k, v in weights.items()}, copied / "model.safetensors")
    service.weights = weights_hash(str(copied))
    with Server(service, port=running.port) as again:
        Connection.known.clear()
        with pytest.raises(ConfigError, match="serves another policy"):
            checkpoint.load_policy(saved)
        assert again.url == running.url


OTHERS = {
    "act": ("act_pictures", None),
    "ddim": ("diffusion_pictures", (8, 3)),
    "ddpm": ("diffusion_ddpm", None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_types_with_their_past_and_the_noise_that_matters(name: str, tmp_path: Path) -> None:
    """ACT, whose chunk has no noise; Diffusion, which sees two or three steps, with DDIM, where the
    noise of the first sample decides, and with DDPM, where it does not."""
    case, noise = OTHERS[name]
    write(case, cases()[case], tmp_path, with_weights=True)
    torch.set_default_dtype(torch.float32)
    service = LeRobotService(*load(str(tmp_path / case), "cpu"), dt=0.1)
    assert service.noise == noise
    seen = {k: leaf.sample(5).numpy() for k, leaf in service.spec.obs.items()}
    chosen = {} if noise is None else {"noise": np.ones(noise, np.float32)}
    memory: dict[str, Any] = {}
    got = [service.infer({k: v[i] for k, v in seen.items()} | chosen, memory) for i in range(5)]
    allow("embodied.policies.remote")
    with Server(service, port=0) as running:
        node = {"_target_": "embodied.policies.remote.policy.RemotePolicy", "url": running.url}
        there = build({**node, "wait": 0.0}, Policy)
        if noise is not None:
            there.sample_noise = lambda n, explore=False: torch.ones(n, *noise)  # pyright: ignore
        actor = Actor(there, 1, execute=1)
        for i in range(5):
            obs = {k: torch.from_numpy(v[i : i + 1]) for k, v in seen.items()}
            actor(obs, torch.tensor([i == 0]))
            if name != "ddpm":
                wanted = torch.from_numpy(got[i]["actions"])
                torch.testing.assert_close(actor.plan[0], wanted, atol=1e-6, rtol=0)
    if name == "act":
        return
    # As LeRobot's own episode: its queues begin with the first observation.
    policy = service.policy
    policy.reset()
    for i in range(5):
        batch = service._batch({k: v[i : i + 1] for k, v in seen.items()}, "")
        policy._queues["action"].clear()
        more = {"noise": torch.ones(1, *noise)} if noise else {}
        said = service.post(policy.select_action(batch, **more))
        if noise:
            torch.testing.assert_close(said[0], torch.from_numpy(got[i]["actions"])[0])


SMALL_GPT = {f"gpt_{name}": 32 for name in ("hidden_dim", "input_dim", "output_dim")}
MORE: dict[str, dict[str, Any]] = {
    "gaussian_actor": {},
    "tdmpc": {"horizon": 2, "n_gaussian_samples": 64, "n_elites": 16},
    "vqbet": {"n_obs_steps": 2, "gpt_n_layer": 1, "gpt_n_head": 2, "crop_shape": (56, 56)}
    | {"pretrained_backbone_weights": None, "vqvae_n_embed": 4, **SMALL_GPT},
}


@pytest.mark.parametrize("kind", MORE)
def test_policies_of_other_kinds_say_what_lerobots_own_episode_begins_with(
    kind: str, tmp_path: Path
) -> None:
    """Single actions; a plan whose time comes first; a transformer over past observations."""
    picture = PolicyFeature(FeatureType.VISUAL, (3, 64, 64))
    seen = {STATE: PolicyFeature(FeatureType.STATE, (4,)), "observation.image": picture}
    acts = {"action": PolicyFeature(FeatureType.ACTION, (3,))}
    sizes = {STATE: (4,), "observation.image": (3, 1, 1), "action": (3,)}
    values = {"mean": 0.0, "std": 1.0, "min": -2.0, "max": 2.0}
    stats = {n: {k: torch.full(size, v) for k, v in values.items()} for n, size in sizes.items()}
    config = make_policy_config(
        kind, input_features=seen, output_features=acts, device="cpu", **MORE[kind]
    )
    torch.manual_seed(0)
    parts = get_policy_class(kind)(config), *make_pre_post_processors(config, dataset_stats=stats)
    for part in parts:
        part.save_pretrained(tmp_path)
    service = LeRobotService(*load(str(tmp_path), "cpu"), dt=0.1)
    obs = {name: leaf.sample(3).numpy() for name, leaf in service.spec.obs.items()}
    policy = service.policy
    policy.reset()
    with torch.no_grad():
        torch.manual_seed(1)
        said = service.post(policy.select_action(service._batch(obs, "")))
    torch.manual_seed(1)
    found = service.infer({**obs, OURS: {"batch": 3}}, {})["actions"]
    assert found.shape == (3, service.chunk, 3) and said.std(0).min() > 0
    np.testing.assert_allclose(found[:, 0], said, atol=1e-6)


def test_a_folder_without_weights_is_refused(smolvla: Path, tmp_path: Path) -> None:
    """LeRobot's pi0 would go on with random ones."""
    (tmp_path / "config.json").write_text((smolvla / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        load(str(tmp_path), "cpu")
