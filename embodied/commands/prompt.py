"""Ask a policy of every reward for one, by reward, goal, demonstration or frames; no training."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from embodied.commands import require_datasets, yaml_values
from embodied.core import checkpoint, formats
from embodied.core.bounds import Count, Number
from embodied.core.build import ConfigError, parse
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.datasets.hub import local_folder
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.evaluation import prompts
from embodied.evaluation.loading import trained_with
from embodied.policies.abilities import TakesPrompts
from embodied.vision.contrastive import open_image_text

USAGE = "embodied prompt RUN reward=DIR | goal={ELEMENT: VALUE} | demos=DIR | frames=DIR, out=DIR"


@dataclass(frozen=True)
class Config:
    """Settings of a prompt; one of `reward`, `goal`, `demos` and `frames` is given."""

    out: str  # folder of the prompted run; must not exist
    reward: str | None = None  # dataset whose rewards are to be maximised
    goal: dict[str, Number] = field(default_factory=dict)  # elements of the state to be in
    demos: str | None = None  # dataset whose states are to be visited
    frames: str | None = None  # dataset whose pictures are to be seen, in any order
    among: str | None = None  # dataset in which the states of goal and frames are looked up
    last: Count | None = None  # states or frames of each episode, from its end; null: all
    nearest: Count = 32  # recorded states that a goal stands for
    camera: str | None = None  # observation with the pictures; null: the only one
    encoder: str = "simclip"  # of pictures: simclip, a CLIP or SigLIP folder, a name on the hub


def run(args: argparse.Namespace) -> None:
    (run,) = args.names
    if not args.words:
        raise ConfigError(USAGE)
    config: Config = parse(Config, yaml_values(args.words), "embodied prompt")
    require_one(config)
    source = next(s for s in (config.reward, config.demos, config.among) if s is not None)
    require_datasets([s for s in (source, config.frames) if s is not None])
    saved = checkpoint.find(run)
    policy = checkpoint.load_policy(saved)
    if not isinstance(policy, TakesPrompts):
        raise ConfigError(f"{run} has one task: prompts are for a policy of every reward")
    u, said = vector(policy, config, source)
    policy.prompt(u)
    write(policy, saved, Path(config.out), {k: v for k, v in vars(config).items() if v})
    print(f"{said}\nwrote     {config.out}\nnext      embodied eval {config.out}")


def require_one(config: Config) -> None:
    named = [name for name in ("reward", "goal", "demos", "frames") if getattr(config, name)]
    if len(named) != 1:
        raise ConfigError(f"one prompt is needed, and {named or 'none'} given: {USAGE}")
    looked_up = named[0] in ("goal", "frames")
    if looked_up and config.among is None:
        raise ConfigError(f"{named[0]}= is looked up in recordings: among=DIR")
    if config.among is not None and not looked_up:
        raise ConfigError(f"among= has no effect with {named[0]}=")
    if config.last is not None and named[0] not in ("demos", "frames"):
        raise ConfigError(f"last= has no effect with {named[0]}=")
    if Path(config.out).exists():
        raise ConfigError(f"out={config.out} exists; give the prompted run another folder")


def vector(policy: Any, config: Config, source: str) -> tuple[Tensor, str]:
    episodes = read_episodes(local_folder(source))
    prompts.require_states(policy.spec, episodes, f"dataset {source}")
    if config.reward is not None:
        count = len(episodes.steps["reward"])
        return prompts.of_reward(policy, policy.spec, episodes), f"rewards of {count:,} steps"
    states = prompts.states_of(policy.spec, episodes, config.last if config.demos else None)
    said = f"states of {len(episodes)} episodes"
    if config.goal:
        states, far = prompts.nearest_states(policy.spec, states, config.goal, config.nearest)
        said = "recorded states; farthest from the goal: " + ", ".join(
            f"{name} {off:.3g}" for name, off in far.items()
        )
    if config.frames is not None:
        place, unlike = looked_up(config, episodes, read_episodes(local_folder(config.frames)))
        states = {name: value[place] for name, value in states.items()}
        said = f"recorded states like {len(place)} frames; {unlike} frames are unlike all of them"
    return prompts.of_states(policy, states), said


def looked_up(config: Config, recorded: Episodes, film: Episodes) -> tuple[Tensor, int]:
    """The places of the recorded states whose pictures are most like the frames of `film`."""
    known = [name for name, leaf in recorded.spec.obs.items() if leaf.is_image]
    cameras = known if config.camera is None else [config.camera]
    if len(cameras) != 1 or cameras[0] not in known or cameras[0] not in film.spec.obs:
        raise ConfigError(f"camera=NAME should be a camera of both datasets: {', '.join(known)}")
    own = Spec({cameras[0]: recorded.spec.obs[cameras[0]]}, recorded.spec.act, recorded.spec.dt)
    seen = load(prompts.states_of(own, film, config.last))[cameras[0]]
    there = load(prompts.states_of(own, recorded))[cameras[0]]
    every = torch.arange(len(recorded))
    episode = torch.cat([every.repeat_interleave(recorded.length), every])
    return prompts.projected(seen, there, episode, open_image_text(config.encoder, "cpu"))


def write(policy: Policy, saved: Path, out: Path, prompt: dict[str, Any]) -> None:
    step = int(checkpoint.read_about(saved)["step"])
    settings = {"format": formats.RUN, **trained_with(saved), "name": out.name, "out": str(out)}
    about = {"prompt": prompt, "metrics": {}}
    checkpoint.save(out / "checkpoints" / saved.name, policy, step, about=about)
    (out / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
