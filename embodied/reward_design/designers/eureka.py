"""Eureka: a language model writes rewards, evolution selects (Ma et al., 2023).

    K programs at temperature 1 -> training -> the best -> reward reflection -> K programs

The K answers are sampled in parallel; one that is refused is returned to the model with the reason.
After the first round the conversation has four messages: role, environment, the best answer of the
newest round that has one, and the reflection on it. While no program could be trained, it is the
newest refused answer and the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.core.bounds import CountOrZero, NonNegative
from embodied.llm.chat import Chat, Message
from embodied.reward_design import prompts
from embodied.reward_design.description import describe
from embodied.reward_design.designer import Board, Designer, Proposal
from embodied.reward_design.journal import Candidate
from embodied.reward_design.prompts import reflect


@dataclass(frozen=True)
class Config:
    """Settings of Eureka."""

    temperature: NonNegative = 1.0  # temperature of the model
    repairs: CountOrZero = 1  # refusals of one program that the model may mend
    human: str = ""  # human feedback that is added to each reflection


class Eureka(Designer):
    """Needs a language model."""

    def __init__(self, config: Config, chat: Chat) -> None:
        self.config = config
        self.chat = chat

    def propose(self, board: Board, number: int, count: int) -> list[Proposal]:
        messages = self.messages(board, number)
        seeds = range(board.seed + number * count, board.seed + (number + 1) * count)
        writer = prompts.Writer(self.chat, board.check, "eureka", self.config.repairs)
        return writer.sample(messages, self.config.temperature, seeds)

    def messages(self, board: Board, number: int) -> list[Message]:
        """Two messages in the first round, four once there was an answer."""
        world = describe(board.spec, board.sentence, "table", board.about)
        system = "\n\n".join([prompts.ROLE, prompts.LANGUAGE, prompts.ENTRY, prompts.TIPS])
        first = [Message("system", system), Message("user", world)]
        best = newest_best(board, number) or newest_refused(board, number)
        if best is None:
            return first
        words = [reflect(best), *filter(None, [self.config.human])]
        reply = str(best.origin["reply"])
        return [*first, Message("assistant", reply), Message("user", "\n\n".join(words))]

    def say(self, board: Board, number: int) -> str:
        """No comment: the reflection is computed from the journal."""
        return ""


def newest_best(board: Board, number: int) -> Candidate | None:
    """The best trained candidate of the newest round before `number` that has one."""
    for earlier in reversed(range(number)):
        tried = [c for c in board.ledger.of_round(earlier) if c.scores and "reply" in c.origin]
        if tried:
            return max(tried, key=lambda c: c.order)
    return None


def newest_refused(board: Board, number: int) -> Candidate | None:
    """The newest answer before round `number` that was refused for what the model wrote."""
    answered = [
        c
        for c in board.ledger.candidates.values()
        if c.round < number and c.problem and not c.scores and "reply" in c.origin
    ]
    return max(answered, key=lambda c: c.id, default=None)
