"""Subgoal bonus: a reward for each subgoal of a list, once; the list is made by a planner.

    r = r_env + bonus (1 - k / limit)     when the active subgoal is reached, k steps after the last

Then the next subgoal of the list becomes active. The planner is a language model that gets a
description of the level (`chat`), or the environment's oracle. The policy does not see subgoals and
needs no planner after training. Words as Beacons (Ruiz-Gonzalez et al., 2024), and its error model:
a subgoal is right with probability `accuracy`.

The environment (`core.env.HasSubgoals`) proposes and checks subgoals, and must expose its whole
level (env.privileged=true). Subgoals are checked once per decision, so decisions should last one
step. Invalid subgoals are counted, not silently dropped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from embodied.core.bounds import Count, CountOrZero, Fraction, Number
from embodied.core.build import ConfigError, Node
from embodied.core.env import HasSubgoals, Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import SYMBOL, Leaf
from embodied.core.tensors import Tensors, under
from embodied.core.wrapper import find_protocol
from embodied.llm.ask_pool import AskPool
from embodied.llm.chat import Answer, Chat, Message, object_schema
from embodied.llm.client import open_chat
from embodied.rewards.wrappers.added_observations import ObservationWrapper

logger = logging.getLogger(__name__)
Kind = Literal["position", "object", "language"]
Code = tuple[int, int, int]


ROLE = (
    "You help an agent that learns to act in a grid world. Given a mission and what there is in "
    "the level, you list the subgoals on the way, the first one first, and nothing else."
)
SCHEMA = object_schema({"subgoals": {"type": "array", "items": {"type": "string"}}})


class Guide(Protocol):
    """An environment's knowledge of subgoals; `whole` are its `privileged/*` observations."""

    limit: int
    """Maximum steps of an episode."""
    highest: Code
    """The largest code of a subgoal that is an object or a sentence."""

    def question(self, kind: str, whole: Tensors, row: int) -> str:
        """The prompt: the level of env `row` and the form of subgoals, in words."""
        ...

    def oracle(self, kind: str, whole: Tensors, row: int) -> list[str]:
        """The correct subgoals."""
        ...

    def understood(self, text: str, whole: Tensors, row: int) -> Code | None:
        """A subgoal parsed to its code; None if it does not exist in the level."""
        ...

    def mistaken(self, kind: str, text: str, whole: Tensors, row: int, seed: int) -> str:
        """A wrong subgoal in place of `text`."""
        ...

    def reached(self, codes: Tensor, before: Tensors, after: Tensors) -> Tensor:
        """Whether each env's subgoal [B, 3] was reached in this step: [B] (bool)."""
        ...


class Planner(Remembered):
    """Makes subgoal lists. `count`: lists, subgoals named, null (not in the level), wrong (error
    model), cut (beyond `most`), empty lists, unanswered requests.

    The language model is asked in the background; `synchronous`: the environment waits for it.
    """

    remembered = ("count", "answers", "missed", "requested")

    def __init__(
        self,
        kind: Kind,
        accuracy: float,
        most: int,
        chat: Chat | None,
        seed: int,
        folder: Path,
        synchronous: bool = False,
    ) -> None:
        self.kind: Kind = kind
        self.accuracy = accuracy
        self.most = most
        self.chat = chat
        self.seed = seed
        self.folder = folder
        self.pool = AskPool[str, Answer](
            lambda prompts: [self._ask(prompt) for prompt in prompts], synchronous=synchronous
        )
        self.answers: dict[str, list[str]] = {}
        self.requested: list[str] = []  # prompts that wait for an answer
        self.count: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()  # unanswered occurrences of a prompt

    def plan(self, guide: Guide, whole: Tensors, row: int) -> list[Code] | None:
        """The subgoals of env `row`'s level, in order, without invalid ones; None while the
        language model has not answered."""
        texts = self._texts(guide, whole, row)
        if texts is None:
            return None
        if self.accuracy < 1:
            texts = self._with_errors(texts, guide, whole, row)
        codes = [guide.understood(text, whole, row) for text in texts]
        there = [code for code in codes if code is not None]
        self.count.update(
            {
                "plans": 1,
                "named": len(texts),
                "null": len(texts) - len(there),
                "cut": max(len(there) - self.most, 0),
                "empty": not there,
            }
        )
        return there[: self.most]

    def collect(self) -> None:
        for asked in self.pool.poll():
            self.requested.remove(asked.question)
            answer = asked.answer
            if answer is None:
                self._write({"question": asked.question, "subgoals": None, "why": asked.why})
                continue
            subgoals = [str(text) for text in answer.data["subgoals"]]
            self.answers[asked.question] = subgoals
            source = {"model": answer.model, "key": answer.key, "cached": answer.cached}
            self._write({"question": asked.question, "subgoals": subgoals, **source})
        left = self.pool.discard() if self.pool.spent else []
        self.requested = [prompt for prompt in self.requested if prompt not in left]
        if left:
            logger.warning("subgoals: %s; new levels have none", self.pool.spent)

    def set_state(self, state: dict[str, Any]) -> None:
        """Prompts that were not answered yet are submitted again."""
        self.pool.clear()
        super().set_state(state)
        self.pool.submit(self.requested)

    def _texts(self, guide: Guide, whole: Tensors, row: int) -> list[str] | None:
        if self.chat is None:
            return guide.oracle(self.kind, whole, row)
        prompt = guide.question(self.kind, whole, row)
        if prompt not in self.answers:
            if prompt not in self.requested and not self.pool.spent:
                # Asked; an unanswered prompt again when it occurred twice as often.
                self.missed[prompt] += 1
                if self.missed[prompt].bit_count() == 1:
                    self.requested.append(prompt)
                    self.pool.submit([prompt])
            self.collect()
        if prompt in self.requested:
            return None
        if prompt not in self.answers:
            self.count["unanswered"] += 1
            return []
        return self.answers[prompt]

    def _ask(self, prompt: str) -> Answer:
        assert self.chat is not None, "the oracle needs no language model"
        return self.chat.ask([Message("system", ROLE), Message("user", prompt)], SCHEMA)

    def _with_errors(self, texts: list[str], guide: Guide, whole: Tensors, row: int) -> list[str]:
        """`texts`, each replaced by a wrong one as the level and the seed determine."""
        level = whole["grid"][row].cpu().numpy().tobytes()
        digest = hashlib.sha256(f"{self.seed}".encode() + level).digest()
        chance = random.Random(int.from_bytes(digest[:8], "big"))
        kept: list[str] = []
        for text in texts:
            right, seed = chance.random() < self.accuracy, chance.getrandbits(32)
            self.count["wrong"] += not right
            kept.append(text if right else guide.mistaken(self.kind, text, whole, row, seed))
        return kept

    def _write(self, facts: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "plans.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")


BONUS = "privileged/bonus"


@dataclass(frozen=True)
class PlanConfig:
    """Settings of lists. A wrong subgoal is the same whenever its level recurs."""

    kind: Kind = "language"  # kind of subgoals: position, object or language
    chat: Node | None = None  # the language model; null: the environment's oracle
    accuracy: Fraction = 1.0  # fraction of right subgoals; the others are replaced by wrong ones
    most: Count = 8  # largest number of subgoals per level
    synchronous: bool = False  # the environment waits for the model, so that it is repeatable


def planner_of(config: PlanConfig, seed: int, folder: Path) -> Planner:
    """The planner of these settings, which writes a language model's lists to `folder`."""
    chat = None if config.chat is None else open_chat(config.chat, folder)
    return Planner(
        config.kind, config.accuracy, config.most, chat, seed, folder, config.synchronous
    )


@dataclass(frozen=True)
class Config(PlanConfig):
    """Settings of the bonus."""

    bonus: Number = 0.2  # reward of a subgoal that is reached at once
    limit: Count | None = None  # steps after which a bonus is 0; null: the episode limit


class SubgoalBonus(Remembered, SummedReward):
    """The bonus is in the transitions; invalid subgoals are counted.

    `folder/plans.jsonl` has every list of a language model, with prompt and provenance; levels with
    the same description are requested once.
    """

    frozen = False
    remembered = ("planner", "reached", "episodes")

    def __init__(self, config: Config, seed: int, folder: Path) -> None:
        self.config = config
        self.planner = planner_of(config, seed, folder)
        self.reached = self.episodes = 0

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with the bonus of every step; ConfigError if it has no subgoals."""
        guide, config = guide_of(env), self.config
        limit = guide.limit if config.limit is None else config.limit
        if limit < 1:
            raise ConfigError("the episode limit depends on the mission: set reward.limit")
        return SubgoalBonusWrapper(env, guide, self.planner, config.most, config.bonus, limit)

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        self.reached += int((transitions[f"next_obs/{BONUS}"] > 0).sum())
        self.episodes += int(step.ended[env_ids].sum())

    def components(self, transitions: Tensors) -> dict[str, Tensor]:
        return {"env": transitions["reward"], "subgoals": transitions[f"next_obs/{BONUS}"]}

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        """Nothing is learned; returns subgoals reached per episode and statistics of the lists."""
        count = self.planner.count
        plans, named = max(count["plans"], 1), max(count["named"], 1)
        facts = {
            "reached": self.reached / max(self.episodes, 1),
            "named": count["named"] / plans,
            "null": count["null"] / named,
            "cut": count["cut"] / plans,
            "wrong": count["wrong"] / named,
            "empty": count["empty"] / plans,
            "unanswered": count["unanswered"] / plans,
        }
        self.reached = self.episodes = 0
        return {name: torch.tensor(float(value)) for name, value in facts.items()}


def guide_of(env: VecEnv) -> Guide:
    """The environment's knowledge of subgoals; ConfigError if it has none."""
    source = find_protocol(env, HasSubgoals)
    if source is None:
        raise ConfigError("this environment has no subgoals; MiniGrid has")
    return source.subgoals()


class SubgoalBonusWrapper(ObservationWrapper):
    """Adds the bonus of the step that led to an observation. Its memory holds each env's list, the
    active subgoal and the steps since the last one.

    A list that a language model makes later than the episode begins is used from then on.
    """

    newest = "bonus"

    def __init__(
        self,
        env: VecEnv,
        guide: Guide,
        planner: Planner,
        most: int,
        bonus: float,
        limit: int,
        leaf: tuple[str, Leaf] = (BONUS, Leaf((), low=0.0)),
    ) -> None:
        if not {"privileged/grid", "privileged/agent"} <= env.spec.obs.keys():
            raise ConfigError(
                "subgoals need the whole level as an observation: env.privileged=true"
            )
        super().__init__(env, *leaf)
        self.guide = guide
        self.planner = planner
        self.most = most
        self.bonus = bonus
        self.limit = limit
        self.every = torch.arange(self.num_envs, device=self.device)
        self.whole: Tensors = {}
        self.late: dict[int, Tensors] = {}  # the initial states of envs without a list yet

    def step(self, action: Tensor) -> Step:
        self._late_plans()
        return super().step(action)

    def observe(self, following: Tensors) -> Tensor:
        memory, after = self.memory, under(following, "privileged")
        active, length = memory["active"], memory["length"]
        codes = memory["plan"][self.every, active.clamp(max=self.most - 1)]
        hit = (active < length) & self.guide.reached(codes, self.whole, after)
        age = memory["age"] + 1
        bonus = self.bonus * hit * (1 - age.float() / self.limit).clamp(min=0)
        memory["active"], memory["age"] = active + hit, age.masked_fill(hit, 0)
        memory["bonus"] = bonus
        return bonus

    def set_state(self, state: Tensors) -> Tensors:
        self.late = {}
        return super().set_state(state)

    def transform_obs(self, obs: Tensors) -> Tensors:
        self.whole = under(obs, "privileged")
        return super().transform_obs(obs)

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        """Makes lists for the new levels."""
        if not self.memory:
            zero = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
            plan = zero[:, None, None].repeat(1, self.most, 3)
            self.memory = {"plan": plan, "length": zero, "active": zero, "age": zero}
            self.memory["bonus"] = zero.float()
        memory = {key: value.clone() for key, value in self.memory.items()}
        memory["bonus"][rows] = 0.0
        started = {key: value.clone() for key, value in under(obs, "privileged").items()}
        for env_id in rows.nonzero().flatten().tolist():
            memory["active"][env_id] = memory["age"][env_id] = 0
            codes = self.planner.plan(self.guide, started, env_id)
            self._set_plan(memory, env_id, codes or [])
            self.late.pop(env_id, None)
            if codes is None:
                self.late[env_id] = started
        self.memory = memory

    def _late_plans(self) -> None:
        """Use the lists that have been made since their episodes began."""
        if not self.late:
            return
        self.planner.collect()
        memory = {key: value.clone() for key, value in self.memory.items()}
        for env_id, started in list(self.late.items()):
            codes = self.planner.plan(self.guide, started, env_id)
            if codes is not None:
                self._set_plan(memory, env_id, codes)
                del self.late[env_id]
        self.memory = memory

    def _set_plan(self, memory: Tensors, env_id: int, codes: list[Code]) -> None:
        memory["length"][env_id] = len(codes)
        memory["plan"][env_id] = 0
        if codes:
            memory["plan"][env_id, : len(codes)] = torch.tensor(codes, device=self.device)


@dataclass(frozen=True)
class ObservedConfig(PlanConfig):
    """Settings of observed subgoals."""

    seed: CountOrZero = 0  # decides which subgoals are wrong
    plans: str = "outputs/subgoals"  # folder in which a language model's lists are written


class ObservedSubgoals(SubgoalBonusWrapper):
    """Adds the observation `subgoal` [3], the code of the active subgoal, whose first number is one
    larger (0: no subgoal is active). The reward stays the environment's."""

    newest = "subgoal"

    def __init__(self, config: ObservedConfig, env: VecEnv) -> None:
        guide = guide_of(env)
        form, first, second = guide.highest
        grid = env.spec.obs.get("privileged/grid")
        if grid is not None and config.kind == "position":
            first = max(first, grid.shape[0] - 1)
            second = max(second, grid.shape[1] - 1)
        leaf = Leaf((3,), "int64", 0, (form + 1, first, second), SYMBOL)
        planner = planner_of(config, config.seed, Path(config.plans))
        super().__init__(env, guide, planner, config.most, 0.0, 1, ("subgoal", leaf))

    def observe(self, following: Tensors) -> Tensor:
        super().observe(following)
        self.memory["subgoal"] = self._active()
        return self.memory["subgoal"]

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        super().begin(obs, rows)
        self.memory["subgoal"] = self._active()

    def _active(self) -> Tensor:
        """The codes [B, 3] of the active subgoals."""
        memory = self.memory
        codes = memory["plan"][self.every, memory["active"].clamp(max=self.most - 1)]
        first = torch.tensor([1, 0, 0], device=self.device)
        return (codes + first) * (memory["active"] < memory["length"])[:, None]
