"""Serve a LeRobot policy (SmolVLA, pi0, pi0.5) from LeRobot's own Python environment.

    PYTHON scripts/serve_lerobot.py CHECKPOINT [--port 8000] [--token-file FILE] [--device cuda]

PYTHON has lerobot with the packages of the policy, websockets and PyYAML; this project need not be
installed there. On our side the policy is `init=ws://127.0.0.1:8000` (docs/lerobot.md). The noise
of a decision, [chunk, noise dimension], is an argument: same noise, same chunk. The observations
are LeRobot's features in physical units, pictures uint8 [H, W, 3]; `prompt` is the task in words.
The encoder's features are not offered, and policies that use past observations are not served.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from embodied.core.build import ConfigError
from embodied.core.errors import RemoteError
from embodied.core.spec import Leaf, Spec
from embodied.serve.protocol import NOISE, OURS, Offer, RequestError
from embodied.serve.server import Server

PROMPT = "prompt"
TYPES = ("smolvla", "pi0", "pi05")
"""Types whose chunk is a function of the noise that is given."""


class LeRobotService:
    """What a `Server` offers: LeRobot's policy with its processors; nothing is kept between two
    requests. ConfigError for a policy whose noise cannot be chosen."""

    def __init__(self, policy: Any, pre: Any, post: Any, dt: float = 0.1, text: str = "") -> None:
        self.policy, self.pre, self.post, self.text = policy.eval(), pre, post, text
        config = policy.config
        if config.type not in TYPES:
            raise ConfigError(f"{config.type} is not served; {', '.join(TYPES)} are")
        self.device = next(policy.parameters()).device
        self.shapes = {name: tuple(each.shape) for name, each in config.input_features.items()}
        self.images = {name for name, shape in self.shapes.items() if len(shape) == 3}
        self.noise = (int(config.chunk_size), int(config.max_action_dim))
        obs = {name: self._leaf(name) for name in self.shapes}
        size = int(config.output_features["action"].shape[0])
        self.spec = Spec(obs, Leaf((size,)), dt, text=text)

    def _leaf(self, name: str) -> Leaf:
        shape = self.shapes[name]
        if name in self.images:
            return Leaf((*shape[1:], shape[0]), dtype="uint8")
        return Leaf(shape)

    @property
    def metadata(self) -> Mapping[str, Any]:
        offer = Offer(
            batch=True,
            chunk=self.noise[0],
            noise=self.noise,
            spec=self.spec.to_json(),
            software=f"lerobot {self.policy.config.type}",
        )
        return offer.to_metadata()

    @torch.no_grad()
    def infer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The physical actions [chunk, A] (or [B, chunk, A]) of one request; RequestError."""
        extra = request.get(OURS) or {}
        batch = extra.get("batch") if isinstance(extra, dict) else None
        n = 1 if batch is None else int(batch)
        seen = {name: self._value(request, name, n, batch is not None) for name in self.shapes}
        prompt = request.get(PROMPT) or self.text
        given = self.pre({**seen, "task": [str(prompt)] * n})
        more = {}
        if request.get(NOISE) is not None:
            noise = _array(request[NOISE], self.noise, n, batch is not None, NOISE)
            more = {"noise": torch.from_numpy(noise).float().to(self.device)}
        self.policy.reset()  # its queues of observations and actions
        actions = self.post(self.policy.predict_action_chunk(given, **more))
        found = actions.detach().float().cpu().numpy()
        return {"actions": found if batch is not None else found[0], "carry": {}}

    def _value(self, request: Mapping[str, Any], name: str, n: int, batched: bool) -> torch.Tensor:
        """An observation as LeRobot takes it: pictures as floats [n, 3, H, W] in [0, 1]."""
        if name not in request:
            raise RequestError(f"the observation {name} is missing")
        shape = self.spec.obs[name].shape
        value = torch.from_numpy(_array(request[name], shape, n, batched, name))
        if name not in self.images:
            return value.float()
        if value.dtype != torch.uint8:
            raise RequestError(f"{name} should be a picture of uint8, not {value.dtype}")
        return value.permute(0, 3, 1, 2).contiguous().float() / 255


def _array(value: Any, shape: tuple[int, ...], n: int, batched: bool, name: str) -> Any:
    """`value` as an array [n, *shape]; RequestError."""
    array = np.array(value)
    wanted = (n, *shape) if batched else tuple(shape)
    if array.dtype.kind not in "biuf" or array.shape != wanted:
        raise RequestError(f"{name} is {list(array.shape)}, and should be {list(wanted)}")
    return array.reshape(n, *shape)


def load(folder: str, device: str) -> tuple[Any, Any, Any]:
    """LeRobot's policy of a checkpoint folder, and its processors; ConfigError."""
    for name in ("config.json", "model.safetensors"):  # LeRobot's pi0 goes on without weights
        if not (Path(folder) / name).is_file():
            raise ConfigError(
                f"{folder} has no {name}: give a checkpoint's folder, pretrained_model"
            )
    try:
        factory = importlib.import_module("lerobot.policies.factory")
        configs = importlib.import_module("lerobot.configs.policies")
    except ImportError as error:
        raise ConfigError(
            f"this Python has no LeRobot ({error}): pip install 'lerobot[smolvla,pi]'"
        ) from error
    config = configs.PreTrainedConfig.from_pretrained(folder)
    config.device = device
    policy = factory.get_policy_class(config.type).from_pretrained(folder, config=config)
    override = {"device_processor": {"device": device}}
    pre, post = factory.make_pre_post_processors(
        config, pretrained_path=folder, preprocessor_overrides=override
    )
    return policy, pre, post


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", help="a folder with config.json and model.safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--token-file", help="a file with the access token; needed off this machine"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fps", type=float, default=10.0, help="decisions per second")
    parser.add_argument(
        "--task", default="", help="the task in words, for clients without a prompt"
    )
    args = parser.parse_args()
    token = Path(args.token_file).read_text().strip() if args.token_file else None
    service = LeRobotService(*load(args.folder, args.device), dt=1 / args.fps, text=args.task)
    with Server(service, args.host, args.port, token) as server:
        print(f"serving {service.policy.config.type} at {server.url}; noise {service.noise}")
        sys.stdout.flush()
        threading.Event().wait()  # until Ctrl-C


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        main()
    except (ConfigError, RemoteError) as error:
        sys.exit(f"serve_lerobot: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
