"""A world in words, without software or success; the program that is taken from an answer."""

from __future__ import annotations

import pytest

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.reward_design.prompts import SOFTWARE, about, describe, extract
from embodied.rewards.handcrafted.program import known, variables
from tests.reward_design.instant import WORLD, Recital

NAMES = ("q1", "q2", "tool_x", "tool_y", "tool_z", "width", "cup_from_tool_x", "cup_from_tool_y")
NAMES = (*NAMES, "cup_from_tool_z")
SPEC = Spec(
    {"state": Leaf((9,), names=NAMES), "privileged/mass": Leaf((1,), low=0.0, high=2.0, unit="kg")},
    Leaf((2,), low=-1.0, high=1.0, names=("dx", "grip")),
    dt=0.05,
)

TABLE = """\
Task: lift the cup
World: A cup.
One step lasts 0.05 s. An episode ends when the task is achieved, or when its time is over; after \
its end nothing is paid any more. Positions and lengths are in metres, angles in radians, unless a \
unit is given.

Variables (tensors [N, ...]; `next_NAME` is NAME at the end of the step):
- state: float32[9] elements q1, q2, tool_x, tool_y, tool_z, width, cup_from_tool_x, \
cup_from_tool_y, cup_from_tool_z
- q: float32[2] elements q1, q2
- tool: float32[3] x, y, z in the base frame
- width: float32[]
- cup_from_tool: float32[3] vector from tool to cup
- privileged_mass: float32[1] unit kg; in [0, 2]
- action: float32[2] elements dx, grip; in [-1, 1]"""


def test_the_table_is_this() -> None:
    assert describe(SPEC, "lift the cup", "table", "A cup.") == TABLE


def test_the_class_tree_has_the_same_names() -> None:
    tree = describe(SPEC, "lift the cup", "pythonic")
    assert "class State:\n    state: Tensor[N, 9]" in tree
    assert "class PrivilegedMass:\n    privileged_mass: Tensor[N, 1]  # unit kg; in [0, 2]" in tree
    for name in variables(SPEC):
        assert f"{name}: Tensor[N" in tree


def test_names_of_programs() -> None:
    names = known(SPEC)
    assert "next_cup_from_tool" in names and "next_action" not in names
    assert not {"reward", "success", "discount", "next_reward"} & set(names)


@pytest.mark.parametrize(
    "world",
    [
        WORLD,
        {"_target_": "embodied.envs.gym.Gym", "id": "Pendulum-v1", "num_envs": 1},
        {"_target_": "embodied.envs.fr3.env.Fr3", "task": "reach", "num_envs": 1},
    ],
    ids=lambda world: world["_target_"],
)
def test_no_software_is_named(world: dict[str, object]) -> None:
    env = build(world, VecEnv)
    env.close()
    text = describe(env.spec, env.spec.text, "table", about(env))
    assert SOFTWARE.search(text.replace(" rows", "")) is None, text
    assert "success" not in text


def fenced(body: str, fence: str = "```") -> str:
    return f"{fence}python\ndef reward(x):\n    return {body}\n{fence}\n"


DRAFT = fenced("-x + 0 * x  # a longer draft with the wrong sign")
EXTRACTED = {
    "the last block": DRAFT + "No, the other way round:\n" + fenced("x"),
    "reasoning": f"<think>{DRAFT}</think>\n{fenced('x')}",
    "reasoning without its start": f"{DRAFT}</think>\n{fenced('x')}",
    "reasoning after the answer": f"{fenced('x')}\n<think>Or perhaps\n{DRAFT}",
    "tildes": fenced("x", "~~~"),
    "longer fences": fenced("x", "````"),
    "a block that is not closed": fenced("x") + "or\n```python\ndef reward(x):\n    return -x",
    "a block of another kind": fenced("x") + "```\npip install nothing\n```\n",
    "an indented block": "1. So:\n   " + fenced("x").replace("\n", "\n   "),
    "windows": fenced("x").replace("\n", "\r\n"),
}


@pytest.mark.parametrize("name", EXTRACTED)
def test_extraction_takes_the_last_complete_block(name: str) -> None:
    assert extract(EXTRACTED[name]).source == "def reward(x):\n    return x\n"


def test_extraction_keeps_helpers_and_says_what_is_missing() -> None:
    found = extract(Recital([]).texts["two fences"])
    assert found.source is not None and "x * 1.0" in found.source
    problem = extract(f"<think>Let me see\n{DRAFT}").problem
    assert "ends within its reasoning" in problem and "max_tokens" in problem
    assert extract(fenced("x"), ("sparse", "dense")).problem.endswith("sparse and dense")
