"""Make a run of a LeRobot checkpoint (ACT, Diffusion), to improve, evaluate and deploy it."""

from __future__ import annotations

import argparse
from pathlib import Path

from embodied.commands import require_at_least
from embodied.core.build import ConfigError


def run(args: argparse.Namespace) -> None:
    from embodied.compose import compose

    folder = Path(args.path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give one with config.json, model.safetensors")
    node = compose("adopt", args.words, args.config_dir).node
    for key in ("chunk", "steps"):
        if node[key] is not None:
            require_at_least(node, {key: 1})
    from embodied.adopt.adopt import Options, adopt

    out = Path(node.pop("out") or Path("outputs") / folder.resolve().name)
    ignore = node.pop("ignore") or []
    if not isinstance(ignore, list):
        raise ConfigError(f"ignore={ignore} should be names of fields: ignore=[FIELD]")
    policy = adopt(folder, out, Options(**node, ignore=tuple(map(str, ignore))))
    described(policy, out, node.get("env") is not None)


def described(policy: object, out: Path, env: bool) -> None:
    """Print what was adopted and what can be typed next."""
    from embodied.core.policy import Policy

    assert isinstance(policy, Policy)
    millions = sum(p.numel() for p in policy.parameters()) / 1e6
    shape = list(policy.sample_noise(1).shape[1:])
    print(f"policy    {type(policy).__name__}, {millions:.1f} million parameters")
    print(f"chunk     {policy.chunk} steps of {policy.spec.act.size} values; noise {shape}")
    print(f"units     {'actions in [-1, 1]' if env else 'physical, as in the training data'}")
    print(f"wrote     {out}")
    if env:
        print(f"next      embodied eval {out}")
    else:
        print(f"next      embodied serve {out}")
