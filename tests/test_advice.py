"""Messages that name what to type: it is typed, and works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import EpisodeWriter
from tests.builders import exit_of, recorded

BC = "policy=flow learner=imitate size=debug steps=4 demos={demos} out={out} video=false"
IQL = "env=two_gap policy=gaussian learner=iql size=debug out={out} video=false"
POSE = ("qx", "qy", "qz", "qw")
CASES = [
    # what is refused, what it says, what is typed then
    (
        f"train env=two_gap instruction=vector {BC}",
        "instruction=vector is for demos= without env=",
        f"train instruction=vector {BC}",
    ),
    (
        f"train eval.shared=true eval.num_envs=1 {BC}",
        "eval.shared needs an environment: env=NAME",
        f"train env=two_gap env.num_envs=1 eval.shared=true eval.num_envs=1 {BC}",
    ),
    (
        "demos rotate {poses} out={out}",
        "say what to rewrite: column=... (column=action from=quaternion)",
        "demos rotate {poses} column=action from=quaternion to=6d first=1 out={out}",
    ),
    (
        "demos rotate {poses} column=action from=quaternion to=6d out={out}",
        "action has 5 elements: first=N, where the 4 of the rotation begin (from 0)",
        "demos rotate {poses} column=action from=quaternion to=6d first=1 out={out}",
    ),
    (
        "demos relative {poses} out={out}",
        "observation.state has no hand, which the action counts from: keep=hand, or",
        "demos relative {poses} keep=hand out={out}",
    ),
    ("export {run}", "say where to write: --to DIR, or --lerobot DIR", "export {run} --to {out}"),
    (f"train {IQL}", "demos=DIR", f"train {IQL} steps=4 demos={{demos}}"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Demonstrations and a run of env=two_gap; poses of a hand as actions."""
    folder = tmp_path_factory.mktemp("advice")
    made = {name: folder / name for name in ("demos", "run", "poses")}
    words = f"demos collect env=two_gap episodes=4 out={made['demos']}"
    assert exit_of(*words.split()) == 0
    assert exit_of(*f"train env=two_gap {BC}".format(out=made["run"], **made).split()) == 0
    turns = torch.from_numpy(Rotation.random(9, np.random.default_rng(0)).as_quat()).float()
    spec = Spec({"state": Leaf((4,), names=POSE)}, Leaf((5,), names=("hand", *POSE)), dt=0.1)
    with EpisodeWriter(made["poses"], spec) as writer:
        writer.add(recorded({"state": turns}, torch.cat([torch.rand(8, 1), turns[:8]], 1)))
    return made


@pytest.mark.parametrize(("wrong", "line", "right"), CASES)
def test_what_a_message_says_works(
    wrong: str, line: str, right: str, places: Any, tmp_path: Path, capsys: Any
) -> None:
    words = {**places, "out": tmp_path / "out"}
    assert exit_of(*wrong.format(**words).split()) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1
    assert exit_of(*right.format(**words).split()) == 0
