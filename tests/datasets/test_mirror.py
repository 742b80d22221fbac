"""Reflections of recordings, and failed attempts as episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.spec import POINTS, Leaf, Spec
from embodied.datasets.editing.attempts import attempts, failed_attempt
from embodied.datasets.editing.mirror import Table, mirror, mirrored, other_side, read_table
from embodied.datasets.lerobot.reader import DatasetError, EpisodeWriter, read_episodes
from embodied.embodiments import fr3
from embodied.envs.fr3.base import ROBOT_NAMES
from embodied.envs.fr3.tasks import TASKS
from tests.builders import exit_of, recorded

ROBOTS = Path("embodied/embodiments")
SO101 = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
NAMES = [
    *(("fr3", (*ROBOT_NAMES, *TASKS[name].names)) for name in ("insert", "lift", "push", "slalom")),
    ("so101", tuple(f"{side}_{joint}.pos" for side in ("left", "right") for joint in SO101)),
]
ARMS = Spec(
    {
        "state": Leaf((4,), names=("left_x", "left_y", "right_x", "right_y")),
        "left_wrist": Leaf((4, 6, 3), "uint8"),
        "right_wrist": Leaf((4, 6, 3), "uint8"),
        "seen": Leaf((5, 3), unit=POINTS),
    },
    Leaf((2,), low=-1.0, high=1.0, names=("dx", "dy")),
    dt=0.1,
    text="put the left cube upright",
)
TABLE = Table(keep=("*_x", "dx"), negate=("*_y",), about={"dy": 0.1})


@pytest.mark.parametrize(("robot", "names"), NAMES)
def test_every_table_is_an_involution(robot: str, names: tuple[str, ...]) -> None:
    table = read_table(ROBOTS / f"{robot}_mirror.yaml")
    order, sign, shift = table.reflection(names, "state")
    there = torch.randn(3, len(names), dtype=torch.float64)
    once = there[:, order] * sign + shift
    assert not torch.allclose(once, there)
    torch.testing.assert_close(once[:, order] * sign + shift, there)


def test_the_mirrored_fr3_holds_its_hand_where_the_mirror_does() -> None:
    """Place and turn of the tool, and their change with the joint velocities, by kinematics."""
    order, sign, shift = read_table(ROBOTS / "fr3_mirror.yaml").reflection(ROBOT_NAMES, "state")
    q = np.random.default_rng(0).uniform(fr3.LOWER, fr3.UPPER, (20, 7))
    other = q[:, order[:7]] * sign[:7].numpy() + shift[:7].numpy()
    flip = np.diag([1.0, -1.0, 1.0])
    place, turn, jacobian = fr3.forward(q)
    place_there, turn_there, jacobian_there = fr3.forward(other)
    np.testing.assert_allclose(place_there, place @ flip, atol=1e-6)
    np.testing.assert_allclose(turn_there, flip @ turn @ flip, atol=1e-6)
    moved = flip @ jacobian[:, :3] * sign[7:14].numpy()
    np.testing.assert_allclose(jacobian_there[:, :3], moved, atol=1e-6)
    assert sign[14:21].tolist() == [1, -1, 1, 1, -1, 1, 1], "tool, lead, width"


def two_arms(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    obs = {
        "state": torch.randn(4, 4, generator=random),
        "seen": torch.randn(4, 5, 3, generator=random),
    }
    for side in ("left", "right"):
        shape = (4, 4, 6, 3)
        obs[f"{side}_wrist"] = torch.randint(256, shape, generator=random).to(torch.uint8)
    return recorded(obs, 0.5 * torch.randn(3, 2, generator=random))


def test_sides_signs_pictures_and_points_by_hand() -> None:
    episode = two_arms()
    made = mirrored(episode, ARMS, TABLE)
    state = episode["obs/state"]
    expected = torch.stack([state[:, 2], -state[:, 3], state[:, 0], -state[:, 1]], 1)
    torch.testing.assert_close(made["obs/state"], expected)
    action = episode["action"]
    torch.testing.assert_close(made["action"], torch.stack([action[:, 0], 0.2 - action[:, 1]], 1))
    assert torch.equal(made["obs/left_wrist"], episode["obs/right_wrist"].flip(2))
    assert torch.equal(made["next_obs/right_wrist"], episode["next_obs/left_wrist"].flip(1))
    signs = torch.tensor([1.0, -1.0, 1.0])
    assert torch.equal(made["next_obs/seen"], episode["next_obs/seen"] * signs)
    assert torch.equal(made["reward"], episode["reward"])
    assert other_side("Left arm, right_wrist, upright") == "Right arm, left_wrist, upright"


def test_a_dataset_mirrored_twice_is_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = Spec({"state": ARMS.obs["state"]}, ARMS.act, 0.1, text=ARMS.text)
    with EpisodeWriter(tmp_path / "one", spec) as writer:
        for seed in range(2):
            human = torch.tensor([False, True, True])
            writer.add({**two_arms(seed), "intervened": human}, info={"number": seed})
    (tmp_path / "table.yaml").write_text("keep: ['*_x', dx]\nnegate: ['*_y', dy]\n")
    given = ("demos", "mirror")
    table = f"table={tmp_path / 'table.yaml'}"
    assert exit_of(*given, tmp_path / "one", table, f"out={tmp_path / 'two'}") == 0
    table = read_table(tmp_path / "table.yaml")
    assert mirror(tmp_path / "two", tmp_path / "three", table).episodes == 2
    one, two, three = (read_episodes(tmp_path / name) for name in ("one", "two", "three"))
    assert not torch.equal(one.steps["obs/state"], two.steps["obs/state"])
    assert two.texts == ("put the right cube upright",) * 2 and three.texts == one.texts
    assert two.info == one.info
    for now in (two.spec, three.spec):
        assert now == one.spec
    for key, value in one.steps.items():
        assert torch.equal(value, three.steps[key]), key
    assert torch.equal(one.final["state"], three.final["state"])
    assert exit_of(*given, tmp_path / "one", f"out={tmp_path / 'x'}") == 2
    assert "say whose reflection" in capsys.readouterr().err


def test_what_has_no_reflection_is_named(tmp_path: Path) -> None:
    cases = [
        (Table(keep=("left_*",)), "state: the table says 0 things of right_x"),
        (Table(keep=("*",), negate=("*_y",)), "says 2 things of left_y"),
        (Table(keep=("*_x", "left_y"), negate=("right_y",)), "not the same for left and right"),
    ]
    for table, line in cases:
        with pytest.raises(DatasetError, match=line):
            table.reflection(ARMS.obs["state"].names, "state")
    with pytest.raises(DatasetError, match="has no right_y"):
        TABLE.reflection(("left_y", "dx"), "state")
    unnamed = Spec({"state": Leaf((4,))}, ARMS.act, 0.1)
    with pytest.raises(DatasetError, match="state has no reflection"):
        mirrored(two_arms(), unnamed, TABLE)
    with pytest.raises(DatasetError, match="task vector"):
        mirrored({**two_arms(), "task": torch.zeros(2)}, ARMS, TABLE)


def test_failed_attempts_end_where_a_person_takes_over_or_tries_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torch.arange(7.0)[:, None]
    human = torch.tensor([False, False, True, True, False, True])
    more = {"intervened": human, "success": torch.tensor([False] * 5 + [True])}
    episode = recorded({"state": state}, -state[:6], **more)
    episode["reward"][-1] = 1.0
    episode["terminated"] = torch.tensor([False] * 5 + [True])
    assert attempts(episode) == [2, 5]
    marked = torch.tensor([True, False, False, True, False, False])
    assert attempts({**episode, "retry": marked}) == [2, 3, 5]
    made = failed_attempt({**episode, "reward": torch.ones(6)}, 2)
    assert made["obs/state"].flatten().tolist() == [0, 1] and made["next_obs/state"].item() == 2
    assert made["reward"].tolist() == [0, 0] and made["terminated"].tolist() == [False, True]
    spec = Spec({"state": Leaf((1,))}, Leaf((1,), low=-9.0, high=9.0), dt=0.1)
    with EpisodeWriter(tmp_path / "one", spec) as writer:
        writer.add(episode)
    assert exit_of("demos", "retries", tmp_path / "one", f"out={tmp_path / 'two'}") == 0
    found = read_episodes(tmp_path / "two")
    assert found.length.tolist() == [2, 5] and not found.steps["success"].any()
    assert found.steps["terminated"].sum() == 2 and not found.steps["reward"].any()
    again = exit_of("demos", "retries", tmp_path / "two", f"out={tmp_path / 'three'}")
    assert again == 0, "the second attempt holds the first"
    with EpisodeWriter(tmp_path / "plain", spec) as writer:
        writer.add({**episode, "intervened": human & False})
    assert exit_of("demos", "retries", tmp_path / "plain", f"out={tmp_path / 'none'}") == 2
    assert "no new attempt is marked" in capsys.readouterr().err
