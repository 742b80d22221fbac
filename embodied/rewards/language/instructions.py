"""RLAdapter: sub-goals from a language model are a part of the observation (Zhang and Lu, 2023).

    digest -> small model: analysis;  digest, analysis -> large model: 3 sub-goals of a closed list
    l = sigma(10 (cos(e(actions), e(sub-goals)) - 0.1))

A digest tells what the environment describes, which actions were chosen since the last sub-goals,
and the comprehension score l of these, which tells how much the actions had to do with them. The
models are asked where an episode begins and every `every` steps. The policy observes
`advice` = e(sub-goals) [SIZE]: zeros before the first answer. The reward stays the environment's.

The small model adapts in stages of `stage` sub-goals. Those analyses are kept after which the
reward was above the stage's mean: `FOLDER/stage_K.jsonl` has them as dialogues, to fine-tune the
model that is served, and the best `examples` of the last stage stand in its prompt from then on.
The source fine-tunes on all answers of a stage, by LoRA. AdaRefiner is its journal version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.core.bounds import Count, CountOrZero, NonNegative
from embodied.core.build import ConfigError, Node
from embodied.core.env import HasAchievements, StateRoles, Step, VecEnv
from embodied.core.spec import SENTENCE, Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.llm.ask_pool import AskPool
from embodied.llm.budget import AppendLog
from embodied.llm.chat import Chat, Message, object_schema
from embodied.llm.client import open_chat
from embodied.llm.reply import one_line
from embodied.nn.sentences import SIZE, sentence_vectors
from embodied.rewards.wrappers.added_observations import ObservationWrapper

logger = logging.getLogger(__name__)
ADVICE = "advice"
GOALS = 3  # sub-goals of an answer
LONGEST = 600  # characters of an analysis
Encoder = Literal["minilm", "words"]
Asked = tuple[int, int, str]
"""An env, the number of its question, and the digest."""

ANALYST = (
    "You advise a planner about a player who learns. Given what the player sees, has and did, and "
    "how well its actions followed the last sub-goals (comprehension, 0 to 1), say in three "
    "sentences at most what it has understood, what it needs next, and what is still too hard."
)
PLANNER = (
    "You choose the next sub-goals of a player who learns. Answer with three of the list, the most "
    "urgent first: what it can reach now and has not achieved. Where its comprehension of the last "
    "ones was low, choose easier ones."
)


@lru_cache(maxsize=4096)
def vector(words: str, encoder: Encoder) -> Tensor:
    """The unit vector [SIZE] of a text: MiniLM's, or a sum of random directions, one for each
    word; zeros for no words."""
    if encoder == "minilm":
        return sentence_vectors([words])[0]
    total = torch.zeros(SIZE)
    for word in re.findall(r"[a-z]+", words):
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:7])
        random = torch.Generator().manual_seed(seed)
        total += functional.normalize(torch.randn(SIZE, generator=random), dim=0)
    return functional.normalize(total, dim=0)


def comprehension(actions: str, goals: str, encoder: Encoder) -> float:
    """The score l of actions and sub-goals, in words."""
    cosine = vector(actions, encoder) @ vector(goals, encoder)
    return float(torch.sigmoid(10 * (cosine - 0.1)))


def spoken(names: Sequence[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in names)


@dataclass(frozen=True)
class Advice:
    """What the models said about a digest."""

    digest: str
    analysis: str
    goals: tuple[str, ...]


class Advisor:
    """Asks both models, and adapts the small one. `folder/advice.jsonl` has every sub-goal with
    what followed it; several environments of a run share it (None: nothing is written or shared).
    """

    def __init__(
        self,
        chat: Chat,
        adapter: Chat | None,
        goals: Sequence[str],
        folder: Path | None,
        temperature: float,
        stage: int,
        examples: int,
    ) -> None:
        kinds = {"enum": list(goals)}
        exactly = {"minItems": GOALS, "maxItems": GOALS, "uniqueItems": True}
        self.schema = object_schema({"goals": {"type": "array", "items": kinds, **exactly}})
        self.chat = chat
        self.adapter = adapter
        self.folder = folder
        self.temperature = temperature
        self.stage = stage
        self.most = examples
        self.log = None if folder is None else AppendLog(folder / "advice.jsonl")
        self.stages = 0  # that are over
        self.new: list[dict[str, Any]] = []  # lines of the log of the stage that goes on
        self.examples: list[dict[str, Any]] = []
        self._adapt()

    def ask(self, digest: str) -> Advice:
        """ChatError where a model has no usable answer."""
        analysis = ""
        if self.adapter is not None:
            asked = [Message("system", ANALYST)]
            for line in self.examples:
                asked.append(Message("user", line["digest"]))
                asked.append(Message("assistant", line["analysis"]))
            asked.append(Message("user", digest))
            said = self.adapter.ask(asked, temperature=self.temperature)
            analysis = one_line(said.text, LONGEST)
        question = f"{digest}\nAnalysis: {analysis}" if analysis else digest
        messages = [Message("system", PLANNER), Message("user", question)]
        answer = self.chat.ask(messages, self.schema, temperature=self.temperature)
        return Advice(digest, analysis, tuple(answer.data["goals"]))

    def record(self, advice: Advice, score: float, reward: float) -> None:
        """What followed: the score, and the sum of rewards until the next sub-goals."""
        line = {**vars(advice), "score": score, "reward": reward}
        if self.log is None:
            self.new.append(line)
        else:
            self.log.append(line)
        self._adapt()

    def _adapt(self) -> None:
        """End the stages that are complete in the log."""
        self.new += [] if self.log is None else self.log.read()
        while len(self.new) >= self.stage:
            lines = self.new[: self.stage]
            self.new = self.new[self.stage :]
            mean = sum(line["reward"] for line in lines) / len(lines)
            best = [line for line in lines if line["analysis"] and line["reward"] > mean]
            best.sort(key=lambda line: line["reward"], reverse=True)
            if best:  # otherwise the same followed all of them
                self.examples = best[: self.most]
            self.stages += 1
            if self.folder is not None:
                kept = [json.dumps({"messages": _dialogue(line)}) + "\n" for line in best]
                (self.folder / f"stage_{self.stages}.jsonl").write_text("".join(kept))


def _dialogue(line: dict[str, Any]) -> list[dict[str, str]]:
    turns = (("system", ANALYST), ("user", line["digest"]), ("assistant", line["analysis"]))
    return [{"role": role, "content": text} for role, text in turns]


@dataclass(frozen=True)
class Config:
    """Settings of the advice."""

    chat: Node  # the large model, which names sub-goals
    adapter: Node | None = None  # the small model, which writes an analysis; null: none is written
    every: Count = 100  # steps between questions
    encoder: Encoder = "words"  # e: minilm (extra `language`), or words, which needs no package
    temperature: NonNegative = 1.0  # of both models
    stage: Count = 1000  # sub-goals after which the small model adapts
    examples: CountOrZero = 3  # analyses of the last stage that it is shown
    folder: str | None = None  # of the log and the kept analyses, one for each run; null: none
    synchronous: bool = False  # the environment waits for answers, so that it is repeatable


class Instructions(ObservationWrapper):
    """Adds the observation `advice`, for an environment that names goals and actions (Crafter). Its
    memory holds each env's sub-goals (numbers from 1), and what was done since they were asked for.
    """

    newest = ADVICE
    memory_roles = StateRoles({"age": None}, {"asked": None}, {"due": None})

    def __init__(self, config: Config, env: VecEnv) -> None:
        world = find_protocol(env, HasAchievements)
        if world is None or env.spec.act.is_continuous:
            raise ConfigError("this environment names no goals and actions; env=crafter does")
        super().__init__(env, ADVICE, Leaf((SIZE,), unit=SENTENCE))
        self.config = config
        self.goals = world.goal_names()
        self.actions = world.action_names()
        folder = None if config.folder is None else Path(config.folder)
        own = None if folder is None else folder / "adapter"
        chat = open_chat(config.chat, folder)
        adapter = None if config.adapter is None else open_chat(config.adapter, own)
        self.advisor = Advisor(
            chat,
            adapter,
            self.goals,
            folder,
            config.temperature,
            config.stage,
            config.examples,
        )
        self.pool = AskPool[Asked, Advice](
            lambda asked: [self.advisor.ask(digest) for _, _, digest in asked],
            synchronous=config.synchronous,
        )
        self.given: dict[int, Advice] = {}  # of each env, since its last question
        self.every = torch.arange(self.num_envs, device=self.device)

    def step(self, action: Tensor) -> Step:
        self._take_answers()
        step = self.env.step(action)
        memory = {key: value.clone() for key, value in self.memory.items()}
        memory["age"] += 1
        memory["reward"] += step.reward
        memory["used"][self.every, action] += 1
        self.memory = memory
        due = memory["age"] >= memory["due"]
        self._close(due | step.ended)
        self._ask(due & ~step.ended)
        following = self.having(step.next_obs, self.memory[ADVICE])
        if step.ended.any():
            self.begin(step.obs, step.ended)
        return replace(step, obs=self.transform_obs(step.obs), next_obs=following)

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        """Ask about the new episodes, which have no sub-goals yet."""
        zero = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        memory = self.memory or {
            ADVICE: torch.zeros(self.num_envs, SIZE, device=self.device),
            "goals": zero[:, None].repeat(1, GOALS),
            "used": zero[:, None].repeat(1, len(self.actions)),
            "score": zero.float(),
            "reward": zero.float(),
            "age": zero,  # steps of the episode
            "due": zero,  # its step before which the next question comes
            "asked": zero,  # questions so far
        }
        self.memory = {key: value.clone() for key, value in memory.items()}
        for key in (ADVICE, "goals", "score", "age"):
            self.memory[key][rows] = 0
        self._ask(rows)

    def set_state(self, state: Tensors) -> Tensors:
        """Questions that were not answered are asked again when the next ones are due."""
        self.pool.clear()
        self.given = {}
        return super().set_state(state)

    def _ask(self, rows: Tensor) -> None:
        memory = self.memory
        memory["asked"] = memory["asked"] + rows
        memory["due"] = torch.where(rows, memory["age"] + self.config.every, memory["due"])
        for env_id in rows.nonzero().flatten().tolist():
            self.given.pop(env_id, None)
            self.pool.submit([(env_id, int(memory["asked"][env_id]), self._digest(env_id))])
        for key in ("used", "reward"):
            memory[key][rows] = 0
        if self.config.synchronous and rows.any():
            self._take_answers()

    def _digest(self, env_id: int) -> str:
        """What the models read about an env."""
        lines = [self.describe(env_id)]
        if goals := self._goals_of(env_id):
            score = float(self.memory["score"][env_id])
            lines.append(f"The last sub-goals: {goals}; comprehension {score:.2f}.")
            lines.append(f"Actions since then, by frequency: {self._actions_of(env_id)}.")
        return "\n".join(lines)

    def _goals_of(self, env_id: int) -> str:
        numbers = self.memory["goals"][env_id].tolist()
        return spoken([self.goals[number - 1] for number in numbers if number])

    def _actions_of(self, env_id: int) -> str:
        """The actions since the last question, the most frequent first."""
        used = self.memory["used"][env_id].tolist()
        order = sorted(range(len(used)), key=lambda action: -used[action])
        return spoken([self.actions[action] for action in order if used[action]])

    def _take_answers(self) -> None:
        """The newest sub-goals become observed; answers to earlier questions are left out."""
        answers = self.pool.poll()
        if self.pool.spent and self.pool.discard():
            logger.warning("advice: %s; sub-goals stay as they are", self.pool.spent)
        advice, goals = self.memory[ADVICE].clone(), self.memory["goals"].clone()
        for asked in answers:
            env_id, number, _ = asked.question
            if asked.answer is None:
                logger.warning("advice: no sub-goals, %s", asked.why)
            elif number == int(self.memory["asked"][env_id]):
                named = asked.answer.goals
                self.given[env_id] = asked.answer
                goals[env_id] = torch.tensor([self.goals.index(name) + 1 for name in named])
                advice[env_id] = vector(spoken(named), self.config.encoder)
        self.memory[ADVICE], self.memory["goals"] = advice, goals

    def _close(self, rows: Tensor) -> None:
        """Score what was done in the envs `rows`, and record it."""
        for env_id in rows.nonzero().flatten().tolist():
            goals = self._goals_of(env_id)
            if not goals:
                continue
            score = comprehension(self._actions_of(env_id), goals, self.config.encoder)
            self.memory["score"][env_id] = score
            if env_id in self.given:
                reward = float(self.memory["reward"][env_id])
                self.advisor.record(self.given.pop(env_id), score, reward)
