"""ManualReader: a SIMULATED language model that answers SPRING's questions by rules, for tests.

It implements the `Chat` protocol and gets the same messages as a language model. It reads what is
in front of the player and in view out of the last message, goes to trees, collects wood, drinks,
and makes a table and wooden tools. Results with it show that the policy works, not that a language
model would play so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embodied.llm.chat import Answer, Chat, Message

NOW = re.compile(r"(?:Now|sees):\n(.*)", re.DOTALL)
FRONT = re.compile(r"in front of it: ([\w ]+)\.")
VIEW = re.compile(r"In view: (.*)\.")
PLACE = re.compile(r"([a-z ]+?) ((?:\d+ \w+ ?)+)$")
COUNT = re.compile(r"(\d+) (\w+)")
VITAL = re.compile(r"(\w+) (\d)/9")
LOW = 4  # of food, drink or energy, where it is wanted before wood


@dataclass(frozen=True)
class Config:
    """Nothing: it has one way to answer."""


class ManualReader(Chat):
    """Answers the nine questions by their schemas."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = "simulated reader of a manual"

    def ask(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        top_logprobs: int = 0,
    ) -> Answer:
        text = "\n".join(message.text for message in messages)
        data = answer_to(text, schema or {})
        return Answer(json.dumps(data), data, self.name, hashlib.sha256(text.encode()).hexdigest())


def answer_to(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """An answer to the last question of a dialogue, by its schema."""
    found: dict[str, Any] = {}
    for name, kind in schema.get("properties", {}).items():
        if "enum" in kind:
            found[name] = best_action(text)
        elif kind.get("type") == "boolean":
            found[name] = True
        elif kind.get("type") == "array":
            found[name] = [best_action(text)] if "enum" in kind["items"] else [task_of(text)]
        else:
            found[name] = task_of(text)
    return found


def best_action(text: str) -> str:
    """What brings the next tool, or else to the nearest tree, or water where it is wanted."""
    now = NOW.findall(text)[-1]
    front = "".join(FRONT.findall(now))
    has = {name: int(count) for count, name in COUNT.findall(now.rpartition("It has ")[2])}
    places = _places(now)
    table = sum(places["table"].values()) <= 2 if "table" in places else False
    wood = has.get("wood", 0)
    if table and wood:
        for tool in ("wood_pickaxe", "wood_sword"):
            if tool not in has:
                return f"make_{tool}"
    if wood >= 4 and "table" not in places and front in ("grass", "sand", "path"):
        return "place_table"
    wanted = task_of(text)
    if front == wanted:
        return "do"
    ways = places.get(wanted)
    return f"move_{max(ways, key=lambda way: ways[way])}" if ways else "move_right"


def task_of(text: str) -> str:
    """The thing that is wanted next."""
    vitals = {name: int(count) for name, count in VITAL.findall(NOW.findall(text)[-1])}
    return "water" if vitals.get("drink", 9) < LOW else "tree"


def _places(now: str) -> dict[str, dict[str, int]]:
    """Steps to the nearest thing of each kind in view, by direction."""
    found: dict[str, dict[str, int]] = {}
    for thing in ", ".join(VIEW.findall(now)).split(", "):
        if place := PLACE.match(thing):
            found[place[1]] = {way: int(steps) for steps, way in COUNT.findall(place[2])}
    return found
