"""adopt: writes a run folder with the policy of a LeRobot checkpoint."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from torch import Tensor

from embodied.adopt.lerobot_config import (
    SETTINGS,
    LeRobotConfig,
    Map,
    Normalization,
    Stats,
    is_buffer,
    read_config,
    read_normalization,
    read_tensors,
)
from embodied.core import checkpoint, formats
from embodied.core.affine import Affine
from embodied.core.bounds import Chunk, Count, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.env import VecEnv
from embodied.core.files import MALFORMED, reading
from embodied.core.policy import Policy
from embodied.core.saved_file import file_hash, fitting
from embodied.core.saved_node import parse_yaml
from embodied.core.spec import Bound, Leaf, Spec
from embodied.datasets.mapping import Mapping, Source, short

SLACK = 0.05  # values may lie that far outside of bounds, relative to their range


@dataclass(frozen=True)
class Names:
    """A mapping file as a policy needs it: `source` of every observation here (None: not given);
    one observation may be several inputs, `also`: {input: observation}."""

    mapping: Mapping = field(default_factory=Mapping)
    also: abc.Mapping[str, str] = field(default_factory=dict[str, str])
    units: bool = False  # the file says what the actions are

    @classmethod
    def load(cls, path: str | None) -> Names:
        """Read a mapping file (None: none); ConfigError."""
        if path is None:
            return cls()
        try:
            node = parse_yaml(Path(path).read_text(), path)
        except (OSError, ValueError):
            return cls(Mapping.load(path))  # with its error
        if not isinstance(node, dict):
            return cls(Mapping.load(path))
        given = cast(dict[str, Any], node)
        obs = given.get("obs")
        also: dict[str, str] = {}
        if isinstance(obs, dict):
            firsts: dict[Any, Any] = {}
            for name, theirs in cast(dict[Any, Any], obs).items():
                several = isinstance(theirs, list) and theirs
                words = [short(str(each)) for each in cast(list[Any], theirs)] if several else []
                also |= {word: str(name) for word in words[1:]}
                firsts[name] = words[0] if words else theirs
            given = {**given, "obs": firsts}
        mapping = Mapping.parse(given, path)
        if mapping.action_elements or any(each.elements for each in mapping.obs.values()):
            raise ConfigError(
                f"{path}: a checkpoint has no names of elements, so elements cannot be matched: "
                "adopt it without env=, and give the mapping to the command that runs it"
            )
        return cls(mapping, also, "action" in given)

    def here(self, wanted: str, spec: Spec) -> tuple[str, Source] | None:
        """Our observation for the input `wanted` (a short name), and how its values are related."""
        for name, source in self.mapping.obs.items():
            if source.name == wanted:
                return name, source
        if wanted in self.also:
            return self.also[wanted], Source(wanted)
        if wanted in spec.obs and wanted not in self.mapping.obs:
            return wanted, Source(wanted)
        return None


def observation_names(config: LeRobotConfig, names: Names, spec: Spec) -> dict[str, str]:
    """Our observation of every input; ConfigError for one that is missing."""
    found: dict[str, str] = {}
    for name, feature in config.inputs.items():
        match = names.here(short(name), spec)
        if match is None or match[0] not in spec.obs:
            kind = "picture" if feature.kind == "image" else f"vector of {feature.shape[0]}"
            missing = "" if match is None else f" ({match[0]}, which the mapping names, is absent)"
            raise ConfigError(
                f"the policy needs {name} (a {kind}), and the environment has no observation for "
                f"it{missing}; it has {', '.join(sorted(spec.obs))}: mapping=FILE with obs: "
                f"{{OURS: {name}}}"
            )
        found[name] = match[0]
    return found


def scaled_inputs(
    config: LeRobotConfig, maps: abc.Mapping[str, Map], names: Names, spec: Spec
) -> dict[str, Map]:
    """The maps of the inputs from our units: here = there * scale + offset."""
    made: dict[str, Map] = {}
    for name, each in maps.items():
        match = names.here(short(name), spec)
        source = match[1] if match else Source(short(name))
        if config.inputs[name].kind == "image" and not source.same_units:
            raise ConfigError(f"{name} is a picture: it has no scale and offset")
        scale = replace(source, offset=0.0).here(each.scale)
        made[name] = Map(source.here(each.low), scale, each.offset)
    return made


def own_units(config: LeRobotConfig, names: Names, spec: Spec) -> dict[str, Affine]:
    """Of the inputs that have other units here: the values here of -1 and +1 there."""
    made: dict[str, Affine] = {}
    for name, each in config.inputs.items():
        match = names.here(short(name), spec)
        if match is not None and not match[1].same_units:
            scale, offset = (
                torch.as_tensor(value, dtype=torch.float64).expand(each.shape)
                for value in (match[1].scale, match[1].offset)
            )
            made[name] = Affine(tuple((offset - scale).tolist()), tuple((offset + scale).tolist()))
    return made


def require_units(
    config: LeRobotConfig, stats: abc.Mapping[str, Stats], names: Names, spec: Spec
) -> None:
    """ConfigError if an input's training data lie outside of the bounds of our observation."""
    for name in config.inputs:
        match, stat = names.here(short(name), spec), stats.get(name, {})
        leaf = spec.obs[match[0]] if match else None
        if leaf is None or leaf.is_image or "min" not in stat or "max" not in stat:
            continue
        assert match is not None
        source = match[1]
        ends = [source.here(stat[key]) for key in ("min", "max")]
        low, high = ends[0].minimum(ends[1]).min().item(), ends[0].maximum(ends[1]).max().item()
        slack = SLACK * (high - low)
        least, most = min(_ends(leaf.low, -math.inf)), max(_ends(leaf.high, math.inf))
        if not (low >= least - slack and high <= most + slack):
            raise ConfigError(
                f"units do not match: {name} is in [{low:g}, {high:g}] in the policy's training "
                f"data, and {match[0]} in [{least:g}, {most:g}]: mapping=FILE with "
                f"obs: {{{match[0]}: {{name: {name}, scale: ..., offset: ...}}}}"
            )


def _ends(bound: Bound, otherwise: float) -> list[float]:
    values = bound if isinstance(bound, tuple) else (bound,)
    return [otherwise if value is None else value for value in values]


def action_units(names: Names, stats: Stats, size: int) -> Affine:
    """The physical values of our actions of -1 and +1; ConfigError if they are not known."""
    given = names.mapping.action
    if isinstance(given, Affine):
        if given.size != size:
            raise ConfigError(f"the mapping's action has {given.size} values, the policy {size}")
        return given
    if names.units:
        keys = ("q01", "q99") if given == "quantiles" else ("min", "max")
        if any(key not in stats for key in keys):
            raise ConfigError(
                f"the checkpoint's statistics of actions have no {' and '.join(keys)}: "
                "mapping=FILE with action: {low: [...], high: [...]}"
            )
        least, most = (stats[key].flatten().tolist() for key in keys)
        return Affine.of_range(least, most)
    low, high = stats.get("min"), stats.get("max")
    if low is None or high is None or low.min() < -1 - SLACK or high.max() > 1 + SLACK:
        seen = "are not known"
        if low is not None and high is not None:
            seen = f"are in [{float(low.min()):g}, {float(high.max()):g}]"
        raise ConfigError(
            f"units do not match: the policy's actions {seen}, the environment's are in [-1, 1]: "
            "mapping=FILE with action: {low: [...], high: [...]}, its values of -1 and +1"
        )
    return Affine((-1.0,) * size, (1.0,) * size)


def own_spec(config: LeRobotConfig, stats: abc.Mapping[str, Stats], fps: float, text: str) -> Spec:
    """The Spec of the checkpoint itself: short names, physical units, the range of its actions."""
    obs: dict[str, Leaf] = {}
    for name, each in config.inputs.items():
        obs[short(name)] = Leaf(each.shape)
        if each.kind == "image":
            channels, height, width = each.shape
            obs[short(name)] = Leaf((height, width, channels), dtype="uint8")
    if len(obs) < len(config.inputs):
        raise ConfigError(f"two inputs have the same name without prefix: {list(config.inputs)}")
    action = stats.get("action", {})
    low, high = (
        tuple(action[key].flatten().tolist()) if key in action else None for key in ("min", "max")
    )
    return Spec(obs, Leaf((config.action,), low=low, high=high), 1 / fps, text=text)


COMPILED = "._orig_mod"  # what torch.compile puts into names
UNUSED = {"diffusion": (), "act": ("model.vae_encoder",)}  # only training uses them


def policy_node(
    config: LeRobotConfig,
    weights: abc.Mapping[str, Tensor],
    names: abc.Mapping[str, str],
    chunk: int | None,
    steps: int | None,
) -> Node:
    """The policy's node; `names`: our observation of each input; `chunk`, `steps`: instead of the
    checkpoint's. ConfigError for a setting without effect."""
    inputs = {
        name: {"obs": names[name], "kind": each.kind, "shape": list(each.shape)}
        for name, each in config.inputs.items()
    }
    if config.type != "diffusion" and steps is not None:
        raise ConfigError("steps are of a Diffusion policy's sampler; an ACT policy has none")
    try:
        if config.type == "diffusion":
            return {**_diffusion(config, weights, chunk, steps), "inputs": inputs}
        return {**_act(config, chunk), "inputs": inputs}
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]}: it is damaged") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"config.json is damaged: {error}") from error


def _shared(config: LeRobotConfig) -> dict[str, Any]:
    """The settings that have another name here only."""
    node: dict[str, Any] = {}
    for ours, theirs, kind, *default in SETTINGS[config.type]:
        place = node
        *groups, name = ours.split(".")
        for group in groups:
            place = place.setdefault(group, {})
        given = config.settings
        place[name] = kind(given.get(theirs, *default) if default else given[theirs])
    return node


def _diffusion(
    config: LeRobotConfig, weights: abc.Mapping[str, Tensor], chunk: int | None, steps: int | None
) -> Node:
    given, node = config.settings, _shared(config)
    resize, crop = given.get("resize_shape"), given.get("crop_shape")  # as LeRobot makes them
    if resize is not None:
        ratio = float(given.get("crop_ratio", 1.0))
        crop = [int(side * ratio) for side in resize] if ratio < 1 else None
    separate = any(name.startswith("diffusion.rgb_encoder.0.") for name in weights)
    return node | {
        "_target_": "embodied.policies.lerobot.diffusion.LeRobotDiffusion",
        "chunk": chunk or int(given["n_action_steps"]),
        "obs_steps": config.obs_steps,
        "steps": steps or int(given.get("num_inference_steps") or node["train_steps"]),
        "clip_sample": float(given["clip_sample_range"]) if given["clip_sample"] else None,
        "images": node["images"] | {"resize": resize, "crop": crop, "separate": separate},
    }


def _act(config: LeRobotConfig, chunk: int | None) -> Node:
    given = config.settings
    if given.get("temporal_ensemble_coeff") is not None and chunk is None:
        raise ConfigError(
            "this ACT policy was run with temporal ensembling, which is not adopted: say how many "
            f"of its {given['chunk_size']} predicted steps are executed, such as chunk=20"
        )
    return _shared(config) | {
        "_target_": "embodied.policies.lerobot.act.LeRobotAct",
        "chunk": chunk or int(given["n_action_steps"]),
    }


def normalization_weights(found: Normalization) -> dict[str, Tensor]:
    """The tensors of the maps of inputs and actions, by our names."""
    parts = {f"normalize.{i}": each for i, each in enumerate(found.inputs.values())}
    made: dict[str, Tensor] = {}
    for name, each in {**parts, "unnormalize": found.action}.items():
        made |= {f"{name}.low": each.low.clone(), f"{name}.scale": each.scale.clone()}
        made[f"{name}.offset"] = each.low.new_tensor(each.offset)
    return made


WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Options:
    """Settings of an adopted policy. Without `env` it keeps its own names and physical units."""

    env: Node | None = None  # environment that the policy is to act in; null: none
    mapping: str | None = None  # file of names and units (docs/lerobot.md); null: none
    chunk: Chunk | None = None  # executed steps of a prediction; null: as in the checkpoint
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
    with reading(folder, *MALFORMED):
        found = read_normalization(folder, config, weights)
    names = Names.load(options.mapping)
    spec = _spec(config, found, options)
    observed = observation_names(config, names, spec)
    with reading(folder / "config.json", *MALFORMED):
        node = policy_node(config, weights, observed, options.chunk, options.steps)
    for name, units in own_units(config, names, spec).items():
        node["inputs"][name]["units"] = units.to_json()
    if options.env is not None:
        require_units(config, found.stats, names, spec)
        units = action_units(names, found.stats.get("action", {}), config.action)
        node["action"] = units.to_json()
    inputs = scaled_inputs(config, found.inputs, names, spec)
    with fitting(weights, folder / "config.json"):
        policy = build(node, Policy, spec=spec)
    named = {name.replace(COMPILED, ""): value for name, value in weights.items()}
    unused = UNUSED[config.type]
    # The network's tensors keep LeRobot's names.
    state = {k: v for k, v in named.items() if not is_buffer(k) and not k.startswith(unused)}
    _load(policy, {**state, **normalization_weights(replace(found, inputs=inputs))}, folder)
    _write(policy, folder, out, options, config.unread)
    return policy


def _spec(config: LeRobotConfig, found: Normalization, options: Options) -> Spec:
    """The environment's Spec, or the checkpoint's own."""
    if options.env is None:
        if options.fps is None or options.fps <= 0:
            raise ConfigError(
                "a checkpoint does not say how often its policy decides: env=NAME, or fps=30"
            )
        return own_spec(config, found.stats, options.fps, options.text)
    env = build({**options.env, "num_envs": 1}, VecEnv)
    spec = env.spec
    env.close()
    if not spec.act.is_continuous or spec.act.size != config.action:
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


def _write(
    policy: Policy, folder: Path, out: Path, options: Options, unread: tuple[str, ...]
) -> None:
    source = {"folder": str(folder.resolve()), "sha256": file_hash(folder / WEIGHTS)}
    origin = {"adopted": {**source, "unread": unread}, "metrics": {}}
    checkpoint.save(out / "checkpoints" / f"{0:08d}", policy, 0, about=origin)
    run: Node = {"format": formats.RUN, "name": out.name, "execute": None, "init": str(folder)}
    if options.env is not None:
        run = {"env": options.env, **run}
    (out / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
