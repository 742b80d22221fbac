"""Text2Reward: programs from a typed description of the environment, refined by human feedback.

Xie et al., 2023. The environment is described as a pythonic class tree; the most similar examples
(by shared words of their instructions) are included. After each round a person comments on the
policy, at the terminal or in a file (one line per round); an empty line, or the end of the file,
ends the search. Without a terminal and a file the rounds go on with the measurements alone.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from embodied.core.bounds import CountOrZero, NonNegative
from embodied.core.build import ConfigError
from embodied.llm.chat import Chat, Message
from embodied.reward_design import prompts
from embodied.reward_design.description import describe
from embodied.reward_design.designer import Board, Designer, Proposal
from embodied.reward_design.designers.eureka import newest_best, newest_refused
from embodied.reward_design.prompts import reflect

PARTS = (
    "A reward usually has some of: the distance from the robot's tool to the object; the "
    "difference between the object and its goal; a small cost of actions; and, where a task has "
    "stages, terms that count only once the stage before is done."
)


@dataclass(frozen=True)
class Config:
    """Settings of Text2Reward."""

    examples: str | None = None  # YAML file of {instruction, code} items; null: none
    shots: CountOrZero = 3  # examples that are included
    feedback: str | None = None  # file with a line per round; null: the terminal, if there is one
    temperature: NonNegative = 0.0  # of the model where it samples one program
    later_temperature: NonNegative = 0.7  # of the model elsewhere
    repairs: CountOrZero = 1  # refusals of one program that the model may mend


class Text2Reward(Designer):
    """Needs a language model."""

    def __init__(self, config: Config, chat: Chat) -> None:
        self.config = config
        self.chat = chat
        self.examples = _examples(config.examples)

    def propose(self, board: Board, number: int, count: int) -> list[Proposal]:
        messages = self.messages(board, number)
        # At temperature 0 several answers to one request would be the same program.
        alone = number == 0 and count == 1
        heat = self.config.temperature if alone else self.config.later_temperature
        seeds = range(board.seed + number * count, board.seed + (number + 1) * count)
        writer = prompts.Writer(self.chat, board.check, "text2reward", self.config.repairs)
        return writer.sample(messages, heat, seeds)

    def messages(self, board: Board, number: int) -> list[Message]:
        world = describe(board.spec, board.sentence, "pythonic", board.about)
        system = "\n\n".join([prompts.ROLE, PARTS, prompts.LANGUAGE, prompts.ENTRY])
        shown = [
            f"Example. Task: {item['instruction']}\n```python\n{item['code'].strip()}\n```"
            for item in closest(self.examples, board.sentence, self.config.shots)
        ]
        first = [Message("system", system), Message("user", "\n\n".join([*shown, world]))]
        best = newest_best(board, number) or newest_refused(board, number)
        if best is None:
            return first
        words, said = reflect(best), board.ledger.said.get(number - 1, "")
        if said:
            words += f"\n\nA person watched the policy and says:\n<<<\n{said[:2000]}\n>>>"
        return [*first, Message("assistant", str(best.origin["reply"])), Message("user", words)]

    def say(self, board: Board, number: int) -> str | None:
        """The person's comment ("": there is none to ask, or nothing was trained); None ends the
        search."""
        if not any(c.scores for c in board.ledger.of_round(number)):
            return ""
        if self.config.feedback is not None:
            lines = Path(self.config.feedback).read_text().splitlines()
            said = lines[number].strip() if number < len(lines) else ""
        elif sys.stdin.isatty():
            said = input("What did the policy do wrong? (nothing ends the search) ").strip()
        else:
            return ""
        return said if said else None


def closest(examples: list[dict[str, str]], sentence: str, count: int) -> list[dict[str, str]]:
    """The `count` examples whose instructions share most words with the sentence, the closest
    last."""
    words = _words(sentence)

    def share(item: dict[str, str]) -> float:
        own = _words(item["instruction"])
        return len(words & own) / max(1, len(words | own))

    return sorted(examples, key=share)[-count:] if count else []


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def _examples(file: str | None) -> list[dict[str, str]]:
    if file is None:
        return []
    items = yaml.safe_load(Path(file).read_text())
    if not isinstance(items, list) or any({"instruction", "code"} - set(i) for i in items):
        raise ConfigError(f"designer.examples: {file} should be a list of {{instruction, code}}")
    return items
