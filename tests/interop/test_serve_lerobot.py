"""LeRobot's SmolVLA, tiny and with random weights, behind our server: its noise is an argument.

Its configuration and tokenizer are of a local folder, as the hub is not reached; the processor of
its pictures, which only provides the numbers of special tokens, is replaced by these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.interop import need

need("lerobot", "transformers", "websockets")

from embodied.commands.train import train  # noqa: E402
from embodied.core import checkpoint  # noqa: E402
from embodied.core.build import allow, build  # noqa: E402
from embodied.core.policy import Policy  # noqa: E402
from embodied.core.spec import Leaf, Spec  # noqa: E402
from embodied.core.tensors import Tensors  # noqa: E402
from embodied.serve.server import Server  # noqa: E402
from policies.steering.dsrl import Dsrl  # noqa: E402
from scripts.serve_lerobot import LeRobotService  # noqa: E402

STATE = "observation.state"
CAMERAS = {"front": "observation.images.front", "wrist": "observation.images.wrist"}
INNER = {"_target_": "policies.gaussian.Gaussian", "hidden": [16]}
MAPPING = {
    "obs": {"state": STATE, **CAMERAS},
    "action": {"low": [-3.0] * 4, "high": [3.0] * 4},
}
PICTURE = Leaf((64, 64, 3), dtype="uint8", low=0.0, high=255.0)
SPEC = Spec(  # of env=fr3_lift_pixels, without what only critics see
    {"state": Leaf((21,)), "front": PICTURE, "wrist": PICTURE},
    Leaf((4,), low=-1.0, high=1.0),
    dt=0.05,
)


def tiny_vlm(folder: Path) -> Path:
    """The configuration of a tiny SmolVLM and a tokenizer of five words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig

    words = {"<pad>": 0, "<unk>": 1, "lift": 2, "the": 3, "cube": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder)
    text = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    config = SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=63, pad_token_id=0
    )
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeRobotService]:
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.policies.smolvla import smolvlm_with_expert
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    folder = tiny_vlm(tmp_path_factory.mktemp("vlm"))
    tokens = SimpleNamespace(fake_image_token_id=60, global_image_token_id=61)
    numbers: Any = SimpleNamespace(tokenizer=tokens)
    features = {
        STATE: PolicyFeature(FeatureType.STATE, (21,)),
        **{c: PolicyFeature(FeatureType.VISUAL, (3, 64, 64)) for c in CAMERAS.values()},
    }
    config = SmolVLAConfig(
        input_features=features,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
        vlm_model_name=str(folder),
        load_vlm_weights=False,
        chunk_size=10,
        n_action_steps=10,
        num_vlm_layers=2,
        resize_imgs_with_padding=(32, 32),
        tokenizer_max_length=6,
        num_steps=3,
        device="cpu",
    )
    with pytest.MonkeyPatch.context() as patched:
        loader = SimpleNamespace(from_pretrained=lambda *_, **__: numbers)
        patched.setattr(smolvlm_with_expert, "AutoProcessor", loader)
        torch.manual_seed(0)
        policy = SmolVLAPolicy(config).float()
    stats = {
        name: {"mean": torch.zeros(size), "std": torch.ones(size)}
        for name, size in {STATE: 21, "action": 4}.items()
    }
    pre, post = make_pre_post_processors(config, dataset_stats=stats)
    yield LeRobotService(policy, pre, post, text="lift the cube")


@pytest.fixture(scope="module")
def server(service: LeRobotService) -> Iterator[Server]:
    allow("policies.remote")
    with Server(service, port=0) as running:
        yield running


@pytest.fixture(scope="module")
def remote(server: Server) -> Policy:
    node = {"_target_": "policies.remote.policy.RemotePolicy", "url": server.url}
    return build({**node, "mapping": MAPPING, "wait": 0.0}, Policy, spec=SPEC)


def observations(n: int) -> Tensors:
    torch.manual_seed(1)
    return {name: leaf.sample(n) for name, leaf in SPEC.obs.items()}


def test_same_noise_same_chunk(remote: Policy) -> None:
    obs, noise = observations(2), remote.sample_noise(2)
    assert noise.shape == (2, 10, 32)
    first, second = (remote.act(obs, {}, noise)[0] for _ in range(2))
    other = remote.act(obs, {}, remote.sample_noise(2))[0]
    assert first.shape == (2, 10, 4)
    assert torch.equal(first, second)
    assert not torch.allclose(first, other)


def test_it_is_lerobots_chunk(service: LeRobotService, remote: Policy) -> None:
    """What arrives here is what LeRobot predicts, in units of here."""
    obs, noise = observations(1), remote.sample_noise(1)
    given = {STATE: obs["state"], "task": ["lift the cube"]}
    given |= {c: obs[k].permute(0, 3, 1, 2).float() / 255 for k, c in CAMERAS.items()}
    service.policy.reset()
    theirs = service.policy.predict_action_chunk(service.pre(given), noise=noise)
    assert torch.allclose(remote.act(obs, {}, noise)[0], theirs / 3, atol=1e-6)


def test_noise_of_one_step_is_shared(remote: Policy) -> None:
    """32 numbers instead of 320; the chunk is that of the repeated noise."""
    node = {"_target_": "policies.steering.dsrl.Dsrl", "shared_noise": True}
    policy = Dsrl.wrap(remote, node, INNER)
    assert policy.inner.spec.act.size == 32
    u = torch.rand(2, 32)
    assert torch.equal(policy.base_noise(u), (1.5 * u)[:, None].expand(2, 10, 32))


def test_dsrl_end_to_end(server: Server, tmp_path: Path) -> None:
    """Steered in simulation, from two cameras, at debug size."""
    file = tmp_path / "names.yaml"
    file.write_text(yaml.safe_dump(MAPPING))
    words = ["experiment=fr3_lift_pixels_dsrl", "finetune=dsrl", "finetune.shared_noise=true"]
    words += [f"init={server.url}", f"mapping={file}", f"output={tmp_path / 'run'}"]
    small = ["size=debug", "steps=48", "data.warmup_steps=24", "env.num_envs=2", "device=cpu"]
    train([*words, *small, "eval.episodes=1", "eval.num_envs=1", "save_every=0"])
    weights = checkpoint.find(tmp_path / "run") / "policy.safetensors"
    assert weights.stat().st_size < 5e6
