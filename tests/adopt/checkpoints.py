"""LeRobot checkpoint folders for tests, made of the recorded ones: other sizes, random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from embodied import cli
from embodied.adopt.adopt import own_spec, policy_node
from embodied.adopt.lerobot_config import read_config
from embodied.commands import checked
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.datasets.mapping import short

DATA = Path(__file__).parent / "data"
STATE, ENV = "observation.state", "observation.environment_state"
STAT = {"min": -1.0, "max": 1.0, "q01": -0.9, "q99": 0.9, "mean": 0.0, "std": 0.5}


def resized(
    case: str, folder: Path, sizes: Mapping[str, int] | None = None, **settings: Any
) -> Path:
    """A copy of the recorded `case` in `folder`, without weights, with other `settings` and other
    `sizes` of its features (data in [0, 1], actions in [-1, 1]); `sizes` None: as recorded."""
    copied = Path(shutil.copytree(DATA / case, folder))
    (copied / "played.safetensors").unlink()
    config = json.loads((copied / "config.json").read_text()) | settings
    for name, size in (sizes or {}).items():
        kind = "output_features" if name == "action" else "input_features"
        config[kind][name]["shape"] = [size]
    (copied / "config.json").write_text(json.dumps(config))
    if sizes is not None:
        for file in copied.glob("*processor.safetensors"):
            stats = load_file(file)
            for name, size in sizes.items():
                own = {key: STAT[key] for key in STAT if f"{name}.{key}" in stats}
                if name != "action":
                    own["min"] = 0.0
                stats |= {f"{name}.{k}": torch.full((size,), v) for k, v in own.items()}
            save_file(stats, file)
    return copied


def untrained(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the network of a checkpoint folder, by name, as they are initialised."""
    config = read_config(folder)
    names = {name: short(name) for name in config.inputs}
    separate = {"diffusion.rgb_encoder.0.": torch.zeros(())}
    shared = config.settings.get("use_separate_rgb_encoder_per_camera") is False
    node = policy_node(config, {} if shared else separate, names, None, None)
    torch.manual_seed(0)
    own = build(node, Policy, spec=own_spec(config, {}, 10.0, "")).state_dict()
    return {k: v for k, v in own.items() if k.startswith(("diffusion.", "model."))}


def random_weights(folder: Path) -> Path:
    """Write random weights into a checkpoint folder."""
    save_file(untrained(folder), folder / "model.safetensors")
    return folder


def two_gap_checkpoint(folder: Path, case: str = "diffusion_numbers", **settings: Any) -> Path:
    """A checkpoint whose features are those of env=two_gap (its state twice)."""
    sizes = {STATE: 2, ENV: 2, "action": 2}
    return random_weights(resized(case, folder, sizes, **settings))


def embodied(*words: str) -> None:
    """What `embodied WORDS` does."""
    args = cli.parse([*words])
    checked(args)(args)


def adopted(base: Path, out: Path, env: str, *words: str) -> Path:
    """The run `out` of the checkpoint `base`, whose state is given twice, in env=`env`."""
    mapping = two_gap_mapping(out.with_suffix(".yaml"))
    embodied("adopt", str(base), f"env={env}", f"mapping={mapping}", f"out={out}", *words)
    return out


def two_gap_mapping(file: Path) -> Path:
    """The mapping file that belongs to it."""
    file.write_text(f"obs: {{state: [{STATE}, {ENV}]}}\n")
    return file
