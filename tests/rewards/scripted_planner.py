"""A SCRIPTED planner behind a real loopback server, to record subgoals as a language model's are.
It asks what all levels of DoorKey and UnlockPickup ask; it shows nothing about any model.
`python -m tests.rewards.scripted_planner FILE` writes the recording."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from embodied.envs.minigrid.describe import COLOURS, KIND
from embodied.envs.minigrid.subgoals import asked
from embodied.llm.chat import Message
from embodied.llm.client import ChatClient, Config
from embodied.rewards.language.subgoal_bonus import ROLE, SCHEMA
from tests.llm.server import Told, serving

MODEL = "scripted-planner"


def planned(question: str) -> list[str]:
    """Subgoals of a question of the kind "language", by rules."""
    goals: list[str] = []
    for colour in re.findall(r"locked (\w+) door", question):
        goals += [f"pick up the {colour} key", f"go to the {colour} door"]
        goals += [f"unlock the {colour} door"]
    wanted = re.search(r"Mission: .*pick up the (\w+ \w+)\.", question)
    return [*goals, f"pick up the {wanted[1]}" if wanted else "get to the goal"]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps({"subgoals": planned(request["messages"][-1]["content"])})
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"model": MODEL, "choices": [choice], "usage": {}}


def questions() -> list[str]:
    """Of DoorKey's levels (they are told alike) and of UnlockPickup's."""
    mission = "use the key to open the door and then get to the goal"
    pairs = [(key, box) for key in COLOURS for box in COLOURS]
    boxes = [question(f"pick up the {box} box", key, "box", box) for key, box in pairs]
    return [question(mission, "yellow", "goal", "green"), *boxes]


def question(mission: str, key: str, target: str, colour: str) -> str:
    """What is asked about a level with a key, its locked door and a target."""
    grid = torch.ones(1, 4, 1, 3, dtype=torch.uint8)
    grid[0, 0, 0] = torch.tensor([KIND["key"], COLOURS.index(key), 0])
    grid[0, 1, 0] = torch.tensor([KIND["door"], COLOURS.index(key), 2])
    grid[0, 2, 0] = torch.tensor([KIND[target], COLOURS.index(colour), 0])
    whole = {"grid": grid, "agent": torch.tensor([[3, 0, 0, 1, 0]])}
    return asked("language", whole, 0, mission)


def record(file: Path) -> None:
    with serving(Told(answer)) as server:
        chat = ChatClient(Config(server.url, MODEL, cache=str(file)))
        for text in questions():
            chat.ask([Message("system", ROLE), Message("user", text)], SCHEMA)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
