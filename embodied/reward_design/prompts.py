"""Prompts for language models that write reward programs: role, language rules, environment."""

from __future__ import annotations

from collections.abc import Sequence

from embodied.llm.chat import Answer, Chat, ChatError, Message
from embodied.reward_design.designer import Proposal
from embodied.reward_design.parse_answer import extract
from embodied.sandbox.table import TABLE

SILENT = "no answer"
ROLE = (
    "You write reward functions for reinforcement learning. A good one leads a policy to the task "
    "by small steps and pays most for the task itself."
)
LANGUAGE = (
    "Rules of the language, a part of Python over torch tensors:\n"
    "- Parameters are the names of variables you need, from the list; all are batched, first "
    "dimension N, and the rows do not know of each other.\n"
    "- No import, if, while, class, lambda, try, f-string, default argument; for only over "
    "range(number). Write torch.where(condition, yes, no), & and | and ~.\n"
    "- Nothing is written in place except keys of a dict. Helper functions are allowed.\n"
    "- Functions of torch that exist: " + ", ".join(sorted(TABLE)) + ".\n"
    "- Numbers are at most 1e6 and exponents at most 8 in size; the reward is at most 1000."
)
ENTRY = (
    "Answer with one code block that holds the whole program. Its last function is\n"
    "    def reward(NAMES OF VARIABLES):\n"
    "        ...\n"
    '        return total, {"component": component}\n'
    "where total and every component are tensors [N]."
)
TIPS = (
    "Tips: bound what you pay with torch.exp or torch.tanh; give each such transformation a "
    "temperature of its own, a named number inside the function; pay for where the step ended "
    "(next_ variables); return each part that you add as a component."
)


def ask(
    chat: Chat,
    messages: Sequence[Message],
    temperature: float,
    seed: int,
    designer: str,
    functions: tuple[str, ...] = ("reward",),
) -> Proposal:
    """Request one program. An error, or an answer without a program, is a proposal with a
    problem."""
    origin = {
        "designer": designer,
        "model": chat.name,
        "seed": seed,
        "asked": as_text_pairs(messages),
    }
    try:
        answer = chat.ask(messages, temperature=temperature, seed=seed)
    except ChatError as error:
        return Proposal(None, origin, f"{SILENT}: {error}")
    found = extract(answer.text, functions)
    origin |= provenance(answer) | {"removed": list(found.removed)}
    problem = "" if found.source is not None else f"answer: {found.problem}"
    return Proposal(found.source, origin, problem)


def provenance(answer: Answer) -> dict[str, object]:
    return {
        "served": answer.model,
        "key": answer.key,
        "cached": answer.cached,
        "tokens": answer.tokens,
        "reply": answer.text,
    }


def as_text_pairs(messages: Sequence[Message]) -> list[list[str]]:
    """Messages as the journal stores them."""
    return [[message.role, message.text] for message in messages]
