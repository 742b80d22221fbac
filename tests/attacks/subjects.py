"""What is fuzzed: a door or the reader of a record, and the sound files of which it gets changes.

A record (a message, an answer of a server, a part of shared memory) is the content of a file here.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
import yaml
from gymnasium import spaces
from minari.serialization import serialize_space

from embodied.commands.train import resumed
from embodied.envs.toy import two_gap
from embodied.models import dynamics
from embodied.real_robot.safety.learned_reflex import Config as ReflexConfig
from embodied.real_robot.safety.learned_reflex import Reflex
from embodied.rewards.success.model import Training, load_labelled, made, write
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from tests.attacks import records
from tests.attacks.doors import DOORS, Door, typed
from tests.attacks.files import SAVED, Bases, Maker, alone, edit, hdf5, mjcf, save_run
from tests.builders import exit_of, node_of
from tests.datasets.test_importers import maniskill_file
from tests.datasets.test_other_formats import write_rlds, write_zarr
from tests.real_robot import test_reflex
from tests.rewards.test_progress import corridor, record


@dataclass(frozen=True)
class Subject:
    make: Maker
    door: Door


def of(kind: str) -> Maker:
    return lambda bases, to: bases.copy(kind, to)


def flow(_: Bases, to: Path) -> Path:
    save_run(to, "generative.flow.Flow", width=8, steps=2)
    return to


def metrics(_: Bases, to: Path) -> Path:
    to.mkdir(parents=True)
    lines = [{"step": step, "time": 0.5 * step, "eval/success": 0.5} for step in (1, 2)]
    (to / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return to


def classifier(_: Bases, to: Path) -> Path:
    data = record(to.with_name("walks"), corridor(3, 6, seed=1))
    how = Training(updates=1, last=2)
    whole, leaves = load_labelled([data], how, 0)
    net, calibration = made(whole, leaves, how, 0)
    write(to, net, leaves, calibration, {"version": 1, "fingerprint": "x", "training": vars(how)})
    return to


def with_base(bases: Bases, to: Path) -> Path:
    """A run whose checkpoint refers to a file of its own folder."""
    made = bases.copy("run", to)
    weights = made / SAVED / "policy.safetensors"
    named = {"part": "", "file": "base.safetensors", "relative": weights.name, "sha256": "0" * 64}
    (made / SAVED / "references.json").write_text(json.dumps([named]))
    return made


def model(_: Bases, to: Path) -> Path:
    node = node_of("models.ensemble.MlpEnsemble", networks=1, elites=1, hidden=[4])
    spec = two_gap.TwoGap(two_gap.Config(num_envs=1)).spec
    made = dynamics.build(node, dynamics.Dynamics, spec=spec)
    made.node = node
    dynamics.save(to, made, dynamics.Fit((), ((1, 0.5),), {}), {})
    return to


def without_hashes(folder: Path) -> None:
    """As an earlier version saved it, so that other checks are reached."""
    for file in folder.glob("checkpoints/*/about.json"):
        edit(file, lambda about: (about.pop("files"), about.pop("format")))


def trained(_: Bases, to: Path) -> Path:
    words = ("env=two_gap", "policy=gaussian", "policy.hidden=[4]", "learner=sac", "size=debug")
    words += ("steps=40", "env.num_envs=2", "eval_every=0", "video=false", "data.replay_size=40")
    assert exit_of("train", *words, f"out={to}") == 0
    without_hashes(to)
    return to


def resume(path: Path, _: Path) -> None:
    """All but the training."""
    node, _ = resumed(path, (), ())
    config = read_config(node)
    if config.data.actors:  # processes and local sockets, as the settings ask for
        return
    with closing(RunComponents(config)) as parts:
        parts.resume(config.resume or "")


def reflex(_: Bases, to: Path) -> Path:
    test_reflex.saved(test_reflex.policy(), to)
    without_hashes(to)
    return to


def safe(path: Path, _: Path) -> None:
    stage = Reflex(ReflexConfig(run=str(path), **test_reflex.FITS), 2, test_reflex.DT)
    tick = test_reflex.tick(np.random.default_rng(0))
    stage.begin(tick.arm)
    stage(tick)


def zarr(_: Bases, to: Path) -> Path:
    write_zarr(to, "meta/episode_ends", np.array([2, 5]), 3, None)
    write_zarr(to, "data/action", np.zeros((5, 2), np.float32), 5, {"id": "lz4"})
    write_zarr(to, "data/img", np.ones((5, 4, 4, 3), np.float32), 3, {"id": "zstd"})
    delta = {"id": "delta", "dtype": "<f4", "astype": "<f4"}
    more = {"filters": [delta]}
    write_zarr(to, "data/state", np.ones((5, 3), np.float32), 4, {"id": "zlib", "level": 1}, **more)
    return to


def robomimic(obs: Any, _: Path) -> None:
    obs["a"] = np.zeros((4, 2))
    obs["seen"] = np.full((4, 4, 4, 3), 7, np.uint8)


def minari(_: Bases, to: Path) -> Path:
    to.mkdir(parents=True)
    seen, acted = spaces.Box(-1, 1, (2,)), spaces.Box(-2, 2, (1,))
    about = {"observation_space": serialize_space(seen), "action_space": serialize_space(acted)}
    about |= {"dataset_id": "a-v0", "total_episodes": 1, "data_format": "hdf5"}
    (to / "metadata.json").write_text(json.dumps(about))
    with h5py.File(to / "main_data.hdf5", "w") as sink:
        one = sink.create_group("episode_0")
        one["observations"], one["actions"] = np.zeros((4, 2)), np.zeros((3, 1))
        one["rewards"] = np.zeros(3)
        one["terminations"] = one["truncations"] = np.array([False, False, True])
        one["infos/success"] = np.array([0.0, 0, 0, 1])
    return to


def maniskill(_: Bases, to: Path) -> Path:
    to.mkdir(parents=True)
    maniskill_file(to / "a.h5", state=False)
    return to


URDF = (
    '<robot name="a"><link name="base"/><link name="l"><inertial><mass value="1"/>'
    '<inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial><collision><geometry>'
    '<cylinder radius=".1" length=".2"/></geometry></collision></link><joint name="j" '
    'type="revolute"><parent link="base"/><child link="l"/><axis xyz="0 0 1"/><origin xyz="0 0 1"/>'
    '<limit lower="-1" upper="1" effort="1" velocity="1"/></joint></robot>'
)
STUDY = {
    "metric": "eval/success",
    "seeds": [0],
    "base": "experiment=two_gap_flow",
    "variants": {"a": "policy.hidden=[8]", "b": ""},
}


def study(path: Path, out: Path) -> None:
    """All but the trainings."""
    with patch("embodied.commands.study.run_study"):
        DOORS["study"](path, out)


def evaluated(path: Path, out: Path) -> None:
    """A copy of the run: its results are written into it."""
    DOORS["eval"](Path(shutil.copytree(path, out)), out)


def inside(door: str, name: str) -> Door:
    return lambda path, out: DOORS[door](path / name, out)


SUBJECTS: dict[str, Subject] = {
    "load": Subject(of("run"), DOORS["load"]),
    "load-flow": Subject(flow, DOORS["load"]),
    "load-base": Subject(with_base, DOORS["load"]),
    "eval": Subject(of("run"), evaluated),
    "export": Subject(of("run"), typed("export", "{path}", "--to", "{out}")),
    "view": Subject(of("run"), DOORS["view"]),
    "resume": Subject(trained, resume),
    "reflex": Subject(reflex, safe),
    "state": Subject(of("run"), DOORS["state"]),
    "metrics": Subject(metrics, DOORS["metrics"]),
    "model": Subject(model, DOORS["model"]),
    "classifier": Subject(classifier, DOORS["classifier"]),
    "adopt-act": Subject(of("act"), DOORS["adopt"]),
    "adopt-diffusion": Subject(of("diffusion"), DOORS["adopt"]),
    "info": Subject(of("png"), DOORS["info"]),
    "check": Subject(of("mp4"), DOORS["check"]),
    "drop": Subject(of("mp4"), DOORS["drop"]),
    "lerobot": Subject(of("v2"), DOORS["lerobot"]),
    "zarr": Subject(zarr, DOORS["zarr"]),
    "rlds": Subject(lambda _, to: write_rlds(to) and to, DOORS["rlds"]),
    "robomimic": Subject(hdf5(robomimic), DOORS["robomimic"]),
    "minari": Subject(minari, DOORS["minari"]),
    "maniskill": Subject(maniskill, inside("maniskill", "a.h5")),
    "mjcf": Subject(mjcf(""), DOORS["describe"]),
    "urdf": Subject(alone(".urdf", URDF), DOORS["describe"]),
    "study": Subject(alone(".yaml", yaml.safe_dump(STUDY)), study),
    **{
        name: Subject(alone(suffix, content), door)
        for name, (suffix, content, door) in records.RECORDS.items()
    },
}
