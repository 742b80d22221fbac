"""A reward program: what it pays by hand, what it writes down, one clear line where it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.env import NotFinite
from embodied.core.reward import Reward
from embodied.core.spec import Leaf, Spec
from embodied.rewards.handcrafted.program import Program, statistics
from tests.builders import node_of

TOOL = ("tool_x", "tool_y", "tool_z", "width")
GOAL = ("goal_from_tool_x", "goal_from_tool_y", "goal_from_tool_z")
ACT = Leaf((2,), low=-1.0, high=1.0)
SPEC = Spec({"state": Leaf((7,), names=TOOL + GOAL)}, ACT, dt=0.1)
CODE = """
def reward(next_goal_from_tool, goal_from_tool, width, action):
    gain = goal_from_tool.norm(dim=-1) - next_goal_from_tool.norm(dim=-1)
    cost = -0.5 * action.square().sum(dim=-1) * width
    return gain + cost, {"gain": gain, "cost": cost}
"""


def made(code: str = CODE, folder: Path | None = None, **settings: Any) -> Program:
    node = node_of("rewards.handcrafted.program.Program", code=code, **settings)
    return build(node, Reward, spec=SPEC, folder=folder)


def rows() -> dict[str, torch.Tensor]:
    """Two rows: 5 m to 3 m from the goal, and 1 m to 2 m; widths 2 and 0."""
    obs, after = torch.zeros(2, 7), torch.zeros(2, 7)
    obs[:, 4:6] = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    obs[0, 3] = 2.0
    after[:, 4:7] = torch.tensor([[0.0, 0.0, 3.0], [0.0, 2.0, 0.0]])
    return {
        "obs/state": obs,
        "next_obs/state": after,
        "action": torch.tensor([[1.0, 1.0], [3.0, 4.0]]),
        "reward": torch.tensor([7.0, 7.0]),
    }


def test_what_it_pays_by_hand() -> None:
    """5 - 3 - 0.5 * 2 * 2 = 0 and 1 - 2 - 0 = -1."""
    program = made()
    assert program(rows()).tolist() == [0.0, -1.0]
    terms = {name: part.tolist() for name, part in program.components(rows()).items()}
    assert terms == {"gain": [2.0, -1.0], "cost": [-2.0, 0.0]}


def test_components_are_written_down_exactly_and_cut_on_resume(tmp_path: Path) -> None:
    """Mean, lowest and highest of each part since the line before."""
    reward = made(folder=tmp_path, every=100)
    for step in (50, 100, 150, 200):
        reward(rows())
        reward.set_step(step)
    terms = {"gain": [0.5, -1.0, 2.0], "cost": [-1.0, -2.0, 0.0], "total": [-0.5, -1.0, 0.0]}
    assert statistics(tmp_path) == [{"step": step, "terms": terms} for step in (100, 200)]
    state = reward.get_state() | {"step": 150, "written": 100}
    reward.set_state(state)
    assert [line["step"] for line in statistics(tmp_path)] == [100]
    with pytest.raises(ConfigError, match="changed since this run"):
        made(CODE.replace("0.5", "0.6"), tmp_path).set_state(state)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"file": "nowhere.py"}, r"nowhere\.py does not exist"),
        ({"code": "import os\n" + CODE}, r"rejected: language: line 1: os cannot be imported"),
        ({"code": "def reward(goal):\n    return goal[:, 0]"}, r'goal \(did you mean "tool"\?\)'),
        ({"code": "def reward(tool):\n    return tool"}, r"shape \[256, 3\]; it should be \[256\]"),
    ],
)
def test_refusals_are_one_line_that_says_what_to_do(settings: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        made(**settings)
    assert "\n" not in str(caught.value)


def test_nan_on_rows_of_the_world_stops_with_one_line() -> None:
    """Made-up rows say nothing about it, the world's do."""
    reward = made("def reward(width):\n    return torch.log(width - 1)")
    with pytest.raises(NotFinite, match="failed in this environment: result: the reward is nan"):
        reward(rows())


def test_what_is_slow_is_said(caplog: pytest.LogCaptureFixture) -> None:
    slow = """
def reward(tool, width):
    total = torch.norm(tool)
    for i in range(3):
        if total > 0.1 * i:
            total = total - 0.1 * width.abs()
    return total
"""
    made(slow)
    assert "microseconds per transition, one transition at a time" in caplog.text
