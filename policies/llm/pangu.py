"""Pangu-Agent: structured reasoning before an action, without training (Christianos et al., 2023).

    a ~ pi(. | o, mu_K(... mu_1(o, M)))

Each intrinsic function mu asks a language model about the observation o and the memory M, and what
it answers is added to M; the action is asked for last. Functions and action are the questions of a
graph (`llm.prompt_graph`), of which there are two:

    think    think, act                   M lasts for the step
    plan     reflect, plan, think, act    lessons and plans stay in M for the next steps

Differences from the source: two fixed compositions of functions, in Crafter, in place of a choice
that is learned; no fine-tuning of the language model. Manual, words of an observation and the
closed list of actions are SPRING's (policies/llm/spring.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.core.text import decode, encode
from embodied.llm.ask_pool import ask_all
from embodied.llm.chat import object_schema
from embodied.llm.prompt_graph import PromptGraph, Question
from embodied.llm.reply import one_line
from embodied.policies.llm import spring
from embodied.policies.llm.spring import ACTION, ACTIONS, FALLBACK, TASKS, TEXT

LONGEST = 200  # characters of a note


def think(*parents: str) -> Question:
    text = "Think step by step: what is the situation, and what should be done next?"
    return Question("think", text, object_schema({"thought": TEXT}), parents)


def act(*parents: str) -> Question:
    text = f"Choose the next action out of this list: {', '.join(ACTIONS)}."
    return Question("action", text, object_schema({"action": ACTION}), parents)


REFLECT = Question(
    "reflect",
    "Compare the observations and the memory: did the last action bring the plan on? State in one "
    "sentence what is learned from it.",
    object_schema({"lesson": TEXT}),
)
PLAN = Question(
    "plan",
    "Make a plan of at most three sub-tasks, the next one first; keep the plan in the memory where "
    "it is still right.",
    object_schema({"tasks": TASKS}),
    ("reflect",),
)
GRAPHS = {
    "think": (think(), act("think")),
    "plan": (REFLECT, PLAN, think("reflect", "plan"), act("plan", "think")),
}


@dataclass(frozen=True)
class Config(spring.Config):
    """Settings of the reasoning."""

    functions: Literal["think", "plan"] = "plan"  # which graph
    memory: Count = 600  # bytes of the memory; the oldest notes are dropped


class Pangu(spring.Spring):
    """Asks the questions of a graph per step and environment. `carry["memory"]` [n, memory] (uint8)
    holds the notes of each environment as UTF-8, the oldest first."""

    config: Config

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.graph = PromptGraph(GRAPHS[config.functions])

    def initial(self, n: int) -> Tensors:
        memory = torch.zeros(n, self.config.memory, dtype=torch.uint8)
        return {**super().initial(n), "memory": memory}

    @torch.no_grad()
    def act(self, obs: Tensors, carry: Tensors, noise: Tensor) -> tuple[Tensor, Tensors]:
        before = decode(carry["memory"])
        texts = [
            f"Memory:\n{memory}\n\n{text}" if memory else text
            for memory, text in zip(before, self.texts(obs, carry), strict=True)
        ]
        found = ask_all(self.answers_for, texts, self.config.parallel)
        action, kept = self.chosen_actions(
            obs, [answers["action"]["action"] if answers else FALLBACK for answers in found]
        )
        notes = [
            remembered(memory, answers, self.config.memory)
            for memory, answers in zip(before, found, strict=True)
        ]
        return action, {**kept, "memory": encode(notes, self.config.memory).to(action.device)}


def remembered(memory: str, answers: Mapping[str, Any], most: int) -> str:
    """The memory after a step: its newest notes that fit into `most` bytes, a note a line. A new
    plan replaces the old one; a lesson that is known is not noted again."""
    notes = memory.splitlines()
    if "reflect" in answers:
        lesson = f"lesson: {one_line(answers['reflect']['lesson'], LONGEST)}"
        notes = [*(note for note in notes if note != lesson), lesson]
    if "plan" in answers:
        tasks = one_line("; ".join(answers["plan"]["tasks"]), LONGEST)
        notes = [*(note for note in notes if not note.startswith("plan: ")), f"plan: {tasks}"]
    while notes and len("\n".join(notes).encode()) > most:
        del notes[0]
    return "\n".join(notes)
