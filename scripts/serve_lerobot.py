"""Serve a LeRobot policy of any type from LeRobot's own Python environment.

    PYTHON scripts/serve_lerobot.py CHECKPOINT [--port 8000] [--token-file FILE] [--device cuda]

PYTHON has lerobot with the packages of the policy, websockets and PyYAML; this project need not be
installed there. On our side the policy is `init=ws://127.0.0.1:8000` (docs/lerobot.md). The
observations are LeRobot's features in physical units, pictures uint8 [H, W, 3]; `prompt` is the
task in words. Past observations, of a policy that takes them, are in the carry of the protocol.

When it starts, the script asks the policy for chunks: with equal noise twice, and with other noise.
Where the noise, and nothing else, decides on the chunk, it is offered and can be chosen (SmolVLA,
pi0, Diffusion with DDIM). The metadata hold the hash of the checkpoint; features are not offered.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
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
from embodied.serve.openpi_wrapper import weights_hash
from embodied.serve.protocol import NOISE, OURS, RESET, Offer, RequestError
from embodied.serve.server import Server

PROMPT = "prompt"
FRESH, HISTORY = "fresh", "history/"
ROWS = 2  # observations that a policy is tried with
Array = np.ndarray[Any, Any]


class LeRobotService:
    """What a `Server` offers: LeRobot's policy with its processors. `weights`: the checkpoint's
    hash. ConfigError for a policy that predicts no actions from an observation alone."""

    def __init__(
        self,
        policy: Any,
        pre: Any,
        post: Any,
        dt: float = 0.1,
        text: str = "",
        weights: str | None = None,
    ) -> None:
        self.policy, self.pre, self.post, self.text = policy.eval(), pre, post, text
        self.weights = weights
        config = policy.config
        self.time_first = config.type == "tdmpc"  # of its chunk
        self.device = next(policy.parameters()).device
        self.shapes = {name: tuple(each.shape) for name, each in config.input_features.items()}
        self.images = {name for name, shape in self.shapes.items() if len(shape) == 3}
        obs = {name: self._leaf(name) for name in self.shapes}
        size = int(config.output_features["action"].shape[0])
        self.spec = Spec(obs, Leaf((size,)), dt, text=text)
        policy.reset()
        queues = getattr(policy, "_queues", None) or {}
        self.queues = [name for name in queues if name != "action"]
        self.past = max((queues[name].maxlen for name in self.queues), default=1) - 1
        self.chunk = self._probed_chunk(size)
        self.noise = self._probed_noise(size)

    def _leaf(self, name: str) -> Leaf:
        shape = self.shapes[name]
        if name in self.images:
            return Leaf((*shape[1:], shape[0]), dtype="uint8")
        return Leaf(shape)

    @property
    def metadata(self) -> Mapping[str, Any]:
        offer = Offer(
            batch=True,
            chunk=self.chunk,
            noise=self.noise,
            carry={name: value[0] for name, value in self._start(1).items()},
            spec=self.spec.to_json(),
            policy=self.weights,
            software=f"lerobot {self.policy.config.type}",
        )
        return offer.to_metadata()

    @torch.no_grad()
    def infer(self, request: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
        """The physical actions [chunk, A] (or [B, chunk, A]) of one request; RequestError."""
        extra = request.get(OURS) or {}
        batch = extra.get("batch") if isinstance(extra, dict) else None
        batched = batch is not None
        n = int(batch) if batched else 1
        seen = {name: self._value(request, name, n, batched) for name in self.shapes}
        carry = self._start(n)
        if OURS not in request and not request.get(RESET):
            carry = memory.get("carry", carry)
        elif isinstance(extra, dict) and extra.get("carry"):
            carry = self._carry(extra["carry"], n, batched)
        noise = None
        if request.get(NOISE) is not None:
            if self.noise is None:
                raise RequestError("the noise of this policy cannot be chosen")
            noise = torch.from_numpy(_array(request[NOISE], self.noise, n, batched, NOISE))
        actions = self._actions(seen, carry, str(request.get(PROMPT) or self.text), noise)
        if OURS not in request:  # its requests are control steps
            memory["carry"] = _remembered(carry, seen)
        found = actions.detach().float().cpu().numpy()
        return {"actions": found if batched else found[0]}

    def _actions(
        self, seen: dict[str, Array], carry: dict[str, Array], prompt: str, noise: Any
    ) -> torch.Tensor:
        """The physical actions [n, chunk, A] of observations and those before them."""
        more = {} if noise is None else {"noise": noise.float().to(self.device)}
        self.policy.reset()  # its queues of observations and actions
        for back in range(self.past):
            before: dict[str, Array] = {}
            for name, now in seen.items():
                wide = np.reshape(carry[FRESH], (-1, *[1] * (now.ndim - 1)))
                before[name] = np.where(wide, now, carry[HISTORY + name][:, back])
            self._queued(self._batch(before, prompt))
        batch = self._queued(self._batch(seen, prompt))
        try:
            actions = self.policy.predict_action_chunk(batch, **more)
        except NotImplementedError:  # a policy of single actions
            return self.post(self.policy.select_action(batch))[:, None]
        return self.post(actions.transpose(0, 1) if self.time_first else actions)

    def _batch(self, seen: dict[str, Array], prompt: str) -> dict[str, Any]:
        """Observations as LeRobot's policy takes them: pictures as floats [n, 3, H, W] in [0, 1],
        normalised by its processors."""
        given: dict[str, Any] = {"task": [prompt] * len(next(iter(seen.values())))}
        for name, value in seen.items():
            tensor = torch.from_numpy(value)
            picture = name in self.images
            given[name] = tensor.permute(0, 3, 1, 2).contiguous() / 255 if picture else tensor
            given[name] = given[name].float()
        return self.pre(given)

    def _queued(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Put a step into the queues of a policy with past observations, as its `select_action`
        does; the batch, with the pictures by the names of the queues."""
        if not self.queues:
            return batch
        batch = {name: value for name, value in batch.items() if name != "action"}
        pictures = [batch[name] for name in self.policy.config.image_features or ()]
        if "observation.images" in self.queues:
            batch["observation.images"] = torch.stack(pictures, dim=-4)
        if "observation.image" in self.queues:
            batch["observation.image"] = pictures[0]
        utils = importlib.import_module("lerobot.policies.utils")
        utils.populate_queues(self.policy._queues, batch, exclude_keys=["action"])
        return batch

    def _probed_chunk(self, action: int) -> int:
        """The number of actions of a decision, found by asking for two; ConfigError."""
        kind = self.policy.config.type
        try:
            rows, *shape = self._probe(None).shape
        except Exception as error:  # of LeRobot, of any kind
            line = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{kind} cannot be served: it predicts no actions for observations of its "
                f"input_features ({type(error).__name__}: {line})"
            ) from error
        if rows != ROWS or len(shape) != 2 or shape[1] != action:
            raise ConfigError(
                f"{kind} cannot be served: it predicts {[rows, *shape]} and not "
                f"[{ROWS}, chunk, {action}] for {ROWS} observations"
            )
        return shape[0]

    def _probed_noise(self, action: int) -> tuple[int, int] | None:
        """The shape of the noise that decides on the chunk; None if nothing of the kind does."""
        config = self.policy.config
        kinds = inspect.signature(self.policy.predict_action_chunk).parameters.values()
        if not any(each.name == "noise" or each.kind is each.VAR_KEYWORD for each in kinds):
            return None
        length = getattr(config, "horizon", None) or getattr(config, "chunk_size", self.chunk)
        for width in (getattr(config, "max_action_dim", None), action):
            if width is None:
                continue
            shape = (int(length), int(width))
            generator = torch.Generator().manual_seed(0)
            first, other = torch.randn(2, 1, *shape, generator=generator)
            try:
                said = [self._probe(noise) for noise in (first, first, other)]
            except (RuntimeError, TypeError, ValueError, AssertionError):
                continue  # of another shape
            if torch.equal(said[0], said[1]) and not torch.equal(said[0], said[2]):
                return shape
        return None

    @torch.no_grad()
    def _probe(self, noise: torch.Tensor | None) -> torch.Tensor:
        """The actions [ROWS, chunk, A] for observations of zeros, at the same `noise` [1, ...]."""
        seen = {name: leaf.zeros(ROWS).numpy() for name, leaf in self.spec.obs.items()}
        wide = None if noise is None else noise.expand(ROWS, *noise.shape[1:])
        return self._actions(seen, self._start(ROWS), self.text, wide)

    def _start(self, n: int) -> dict[str, Array]:
        """What is carried at the start of an episode: no past observations."""
        if not self.past:
            return {}
        past = {
            HISTORY + name: leaf.zeros(n)[:, None].repeat(1, self.past, *[1] * len(leaf.shape))
            for name, leaf in self.spec.obs.items()
        }
        return {FRESH: np.ones(n, bool), **{name: value.numpy() for name, value in past.items()}}

    def _carry(self, given: Any, n: int, batched: bool) -> dict[str, Array]:
        start = self._start(n)
        if not isinstance(given, Mapping) or set(given) != set(start):
            raise RequestError(f"carry is a map of {', '.join(start) or 'nothing'}")
        return {
            name: _array(given[name], value.shape[1:], n, batched, name)
            for name, value in start.items()
        }

    def _value(self, request: Mapping[str, Any], name: str, n: int, batched: bool) -> Array:
        if name not in request:
            raise RequestError(f"the observation {name} is missing")
        value = _array(request[name], self.spec.obs[name].shape, n, batched, name)
        if name in self.images and value.dtype != np.uint8:
            raise RequestError(f"{name} should be a picture of uint8, not {value.dtype}")
        return value


def _remembered(carry: dict[str, Array], seen: dict[str, Array]) -> dict[str, Array]:
    """The carry after a control step at `seen`; at the start all past steps are that one."""
    if not carry:
        return carry
    found = {FRESH: np.zeros_like(carry[FRESH])}
    for name, now in seen.items():
        past = carry[HISTORY + name]
        wide = np.reshape(carry[FRESH], (-1, *[1] * now.ndim))
        shifted = np.concatenate([past[:, 1:], now[:, None]], 1)
        found[HISTORY + name] = np.where(wide, now[:, None], shifted)
    return found


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
    parts, weights = load(args.folder, args.device), weights_hash(args.folder)
    service = LeRobotService(*parts, dt=1 / args.fps, text=args.task, weights=weights)
    with Server(service, args.host, args.port, token) as server:
        noise = "none that can be chosen" if service.noise is None else list(service.noise)
        print(f"serving {service.policy.config.type} at {server.url}; noise {noise}")
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
