"""SPRING: plays Crafter by reading its manual, without training (Wu et al., 2023).

A language model gets the manual and the last two observations in words, and nine questions, which
form a graph (`llm.prompt_graph`): what was done and whether it worked; what is in view and what it
needs; sub-tasks by priority; the requirements of the first; five actions; the best one. The answer
to the last question is the action.

Differences from the source: our words of the rules (or the user's file) in place of the paper's
LaTeX; answers by JSON schemas, the action from the closed list, in place of the first action that
the text contains; answers are kept by the content of their prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError, Node
from embodied.core.policy import Policy
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.llm.ask_pool import ask_all
from embodied.llm.chat import BudgetSpent, ChatError, Message, ServerUnusable, object_schema
from embodied.llm.client import open_chat
from embodied.llm.prompt_graph import PromptGraph, Question

logger = logging.getLogger(__name__)
MANUAL = Path(__file__).parent / "crafter.md"
# As the environment numbers them; directions are left, right, up, down.
ACTIONS = (
    *("noop", "move_left", "move_right", "move_up", "move_down", "do", "sleep", "place_stone"),
    *("place_table", "place_furnace", "place_plant", "make_wood_pickaxe", "make_stone_pickaxe"),
    *("make_iron_pickaxe", "make_wood_sword", "make_stone_sword", "make_iron_sword"),
)
SYMBOLS = (
    *("nothing", "water", "grass", "stone", "path", "sand", "tree", "lava", "coal", "iron"),
    *("diamond", "table", "furnace", "player", "cow", "zombie", "skeleton", "arrow", "plant"),
    "ripe plant",
)
FACING = ("left", "right", "up", "down")
AHEAD = ((0, -1), (0, 1), (-1, 0), (1, 0))  # (down, right)
VITALS = 4  # the first items of the inventory
FALLBACK = "do"  # where there is no usable answer, as in the source
SEEN = ("symbols", "facing", "body", "inventory")

TEXT = {"type": "string"}
ACTION = {"enum": list(ACTIONS)}
TASKS = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}
FIVE = {"type": "array", "items": ACTION, "minItems": 1, "maxItems": 5}
QUESTIONS = (
    Question("done", "Which action did the player take last?", object_schema({"action": TEXT})),
    Question(
        "worked",
        "Did that action do what it should have done? If not, why not? Compare both observations.",
        object_schema({"worked": {"type": "boolean"}, "why": TEXT}),
        ("done",),
    ),
    Question(
        "objects",
        "List each kind of thing in view: what it gives, and what the player needs to use it.",
        object_schema({"objects": {"type": "array", "items": TEXT}}),
    ),
    Question(
        "usable",
        "For which of these things does the player have all that it needs now?",
        object_schema({"usable": {"type": "array", "items": TEXT}}),
        ("objects",),
    ),
    Question(
        "tasks",
        "Name the three sub-tasks that the player should work on, the most important one first. "
        "Staying alive comes first, then achievements that are not unlocked yet.",
        object_schema({"tasks": TASKS}),
        ("worked", "usable"),
    ),
    Question(
        "needed",
        "What does the first of these sub-tasks need, and what of it is missing?",
        object_schema({"needed": TEXT, "missing": TEXT}),
        ("tasks",),
    ),
    Question(
        "actions",
        "Name the five best next actions for the first sub-task, the best one first, out of this "
        f"list: {', '.join(ACTIONS)}.",
        object_schema({"actions": FIVE}),
        ("tasks", "needed", "worked"),
    ),
    Question(
        "possible",
        "Which of these actions can be executed now: is all there that they need, and is the right "
        "thing in front of the player?",
        object_schema({"possible": {"type": "array", "items": ACTION}}),
        ("actions",),
    ),
    Question(
        "action",
        "Which is the best action that can be executed now?",
        object_schema({"action": ACTION}),
        ("actions", "possible", "needed"),
    ),
)


@dataclass(frozen=True)
class Config:
    """Settings of SPRING."""

    chat: Node  # the language model
    manual: str | None = None  # text file with the rules of the game; null: the package's
    relevant: bool = False  # use only paragraphs of it that the model calls relevant
    parallel: Count = 8  # environments that are asked about at a time


class Spring(Policy):
    """Asks nine questions per step and environment. `failed` counts the steps without a usable
    answer, in which the action is FALLBACK."""

    questions: Sequence[Question] = QUESTIONS

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__()
        missing = [name for name in SEEN if name not in spec.obs]
        if missing or spec.act.is_continuous or spec.act.high != len(ACTIONS) - 1:
            raise ConfigError(
                f"spring plays env=crafter, with the observations {', '.join(SEEN)}"
                f"{missing and f'; {missing[0]} is missing'}"
            )
        file = MANUAL if config.manual is None else Path(config.manual)
        if not file.is_file():
            raise ConfigError(f"manual={file} does not exist")
        self.config = config
        self.spec = spec
        self.chat = open_chat(config.chat, None)
        self.graph = PromptGraph(self.questions)
        self.paragraphs = [part.strip() for part in file.read_text().split("\n\n") if part.strip()]
        self.chosen = None if config.relevant else self.paragraphs
        self.failed = 0

    def initial(self, n: int) -> Tensors:
        """The observation and the action before; none at first."""
        before = {name: self.spec.obs[name].zeros(n) for name in SEEN}
        last = torch.full((n,), -1)
        return {**{f"before/{name}": value for name, value in before.items()}, "last": last}

    def sample_noise(self, n: int, explore: bool = False) -> Tensor:
        return torch.zeros(n, 0)

    @torch.no_grad()
    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        texts = self.texts(obs, carry)
        return self.chosen_actions(obs, ask_all(self.action_for, texts, self.config.parallel))

    def texts(self, obs: Tensors, carry: Tensors) -> list[str]:
        """What each player sees and saw before, in words."""
        now = {name: obs[name].cpu() for name in SEEN}
        before = {name: carry[f"before/{name}"].cpu() for name in SEEN}
        return [
            seen_text(_row(before, row), _row(now, row), last)
            for row, last in enumerate(carry["last"].tolist())
        ]

    def chosen_actions(self, obs: Tensors, names: Sequence[str]) -> tuple[Tensor, Tensors]:
        """The actions [n, 1] of these names, and what is remembered of this step."""
        kept = {f"before/{name}": obs[name].clone() for name in SEEN}
        numbers = [ACTIONS.index(name) for name in names]
        action = torch.tensor(numbers, device=kept["before/symbols"].device)
        return action[:, None], {**kept, "last": action}

    def action_for(self, text: str) -> str:
        """The action for observations in words: always one of ACTIONS."""
        found = self.answers_for(text)
        return found["action"]["action"] if found else FALLBACK

    def answers_for(self, text: str) -> dict[str, Any]:
        """The answers to all questions about observations in words; none where one has none."""
        try:
            context = [Message("system", "\n\n".join(self.rules())), Message("user", text)]
            return self.graph.answers(self.chat, context)
        except BudgetSpent as error:
            raise ServerUnusable(str(error)) from error
        except ChatError as error:
            self.failed += 1
            logger.warning("%s instead of an answer: %s", FALLBACK, error)
            return {}

    def rules(self) -> Sequence[str]:
        """The paragraphs of the manual that are used; those that are relevant are asked for
        once."""
        if self.chosen is None:
            schema = object_schema({"relevant": {"type": "boolean"}})
            asked = "Does this paragraph help a player to decide what to do?"

            def relevant(paragraph: str) -> bool:
                prompt = [Message("user", f"{asked}\n\n{paragraph}")]
                return bool(self.chat.ask(prompt, schema).data["relevant"])

            told = ask_all(relevant, self.paragraphs, self.config.parallel)
            self.chosen = [
                paragraph for paragraph, yes in zip(self.paragraphs, told, strict=True) if yes
            ]
        return self.chosen


Seen = Mapping[str, NDArray[Any]]


def _row(obs: Tensors, row: int) -> Seen:
    return {name: value[row].numpy() for name, value in obs.items()}


def seen_text(before: Seen, now: Seen, last: int) -> str:
    """Both observations and the action between them (-1: there was none) in words."""
    if last < 0:
        return f"The episode begins. The player sees:\n{described(now)}"
    return (
        f"Before:\n{described(before)}\n\nThen the player chose the action {ACTIONS[last]}.\n\n"
        f"Now:\n{described(now)}"
    )


def described(obs: Seen) -> str:
    """An observation in words: near things with distance and direction, vitals, inventory."""
    cells, facing = obs["symbols"], int(obs["facing"][0])
    down, right = AHEAD[facing]
    middle = cells.shape[0] // 2, cells.shape[1] // 2
    ahead = SYMBOLS[cells[middle[0] + down, middle[1] + right]]
    counts = [round(float(count)) for count in obs["inventory"]]
    vitals = zip(("health", "food", "drink", "energy"), counts[:VITALS], strict=True)
    has = [f"{n} {name}" for n, name in zip(counts[VITALS:], ITEMS, strict=True) if n]
    asleep, light = (float(value) for value in obs["body"])
    state = "asleep" if asleep > 0.5 else "awake"
    return "\n".join(
        [
            f"- It is {state} and faces {FACING[facing]}; in front of it: {ahead}.",
            f"- In view: {_near(cells, middle)}.",
            f"- {', '.join(f'{name} {count}/9' for name, count in vitals)}; daylight {light:.0%}.",
            f"- It has {', '.join(has) or 'nothing'}.",
        ]
    )


ITEMS = (
    *("sapling", "wood", "stone", "coal", "iron", "diamond", "wood_pickaxe", "stone_pickaxe"),
    *("iron_pickaxe", "wood_sword", "stone_sword", "iron_sword"),
)


def _near(cells: NDArray[Any], middle: tuple[int, int]) -> str:
    """The nearest thing of each kind, the nearest kind first."""
    found: list[tuple[int, str]] = []
    for kind in np.unique(cells).tolist():
        if SYMBOLS[kind] in ("nothing", "player"):
            continue
        at = np.argwhere(cells == kind) - middle
        y, x = at[np.abs(at).sum(1).argmin()].tolist()
        ways = ((y, "down" if y > 0 else "up"), (x, "right" if x > 0 else "left"))
        where = " ".join(f"{abs(steps)} {name}" for steps, name in ways if steps)
        found.append((abs(y) + abs(x), f"{SYMBOLS[kind]} {where}"))
    return ", ".join(text for _, text in sorted(found))
