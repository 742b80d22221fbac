"""adopt: writes a run folder with the policy of a LeRobot checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from embodied.adopt import names as naming
from embodied.adopt.convert import network_weights, normalization_weights, policy_node
from embodied.adopt.lerobot_config import LeRobotConfig, read_config
from embodied.adopt.normalization import Normalization, read_normalization, read_tensors
from embodied.core import checkpoint, formats
from embodied.core.bounds import Count, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.saved_file import file_hash
from embodied.core.spec import Spec

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Options:
    """Settings of an adopted policy. Without `env` it keeps its own names and physical units."""

    env: Node | None = None  # environment that the policy is to act in; null: none
    mapping: str | None = None  # file of names and units (docs/lerobot.md); null: none
    chunk: Count | None = None  # executed steps of a prediction; null: as in the checkpoint
    steps: Count | None = None  # of a Diffusion policy's sampler; null: as in the checkpoint
    fps: Positive | None = None  # decisions a second, without env
    text: str = ""  # task in words, without env
    ignore: tuple[str, ...] = ()  # unknown fields of config.json that do not matter


def adopt(folder: Path, out: Path, options: Options) -> Policy:
    """Write the run folder `out` with the policy of the LeRobot checkpoint `folder`; returns it.

    Raises ConfigError, in one line, for a checkpoint or a mapping that does not fit.
    """
    if (out / "checkpoints").exists():
        raise ConfigError(f"{out} is a run already: out=ANOTHER")
    config = read_config(folder, options.ignore)
    weights = read_tensors(folder / WEIGHTS)
    found = read_normalization(folder, config, weights)
    names = naming.Names.load(options.mapping)
    spec = _spec(config, found, options)
    node = policy_node(
        config, weights, naming.observation_names(config, names, spec), options.chunk, options.steps
    )
    if options.env is not None:
        naming.require_units(config, found.stats, names, spec)
        units = naming.action_units(names, found.stats.get("action", {}), config.action)
        node["action"] = units.to_json()
    inputs = naming.scaled_inputs(config, found.inputs, names, spec)
    policy = build(node, Policy, spec=spec)
    state = network_weights(config, weights)
    _load(policy, {**state, **normalization_weights(replace(found, inputs=inputs))}, folder)
    _write(policy, folder, out, options)
    return policy


def _spec(config: LeRobotConfig, found: Normalization, options: Options) -> Spec:
    """The environment's Spec, or the checkpoint's own."""
    if options.env is None:
        if options.fps is None or options.fps <= 0:
            raise ConfigError(
                "a checkpoint does not say how often its policy decides: env=NAME, or fps=30"
            )
        return naming.own_spec(config, found.stats, options.fps, options.text)
    env = build({**options.env, "num_envs": 1}, VecEnv)
    spec = env.spec
    env.close()
    if spec.act.dtype != "float32" or spec.act.size != config.action:
        raise ConfigError(
            f"the policy has {config.action} action values, and the environment "
            f"{spec.act.size} ({spec.act.dtype}): choose another env="
        )
    return spec


def _load(policy: Policy, state: dict[str, Any], folder: Path) -> None:
    """Load `state`; ConfigError if it does not fit the network that config.json describes."""
    own = policy.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    other = [k for k in own if k in state and own[k].shape != state[k].shape]
    if missing or extra or other:
        what = f"lacks {missing[0]}" if missing else f"has {(extra or other)[0]}"
        more = f" ({len(missing) + len(extra) + len(other)} tensors in all)"
        raise ConfigError(
            f"{folder}/{WEIGHTS} {what}, which does not fit its config.json{more}: is it of a "
            "newer LeRobot?"
        )
    policy.load_state_dict(state)


def _write(policy: Policy, folder: Path, out: Path, options: Options) -> None:
    origin = {
        "adopted": {"folder": str(folder.resolve()), "sha256": file_hash(folder / WEIGHTS)},
        "metrics": {},
    }
    checkpoint.save(out / "checkpoints" / f"{0:08d}", policy, 0, about=origin)
    run: Node = {"format": formats.RUN, "name": out.name, "execute": None, "init": str(folder)}
    if options.env is not None:
        run = {"env": options.env, **run}
    (out / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
