"""Subgoal bonus: a reward for each subgoal of a list, once; the list is made by a planner.

    r = r_env + bonus (1 - k / limit)     when the active subgoal is reached, k steps after the last

Then the next subgoal of the list becomes active. The planner is a language model that gets a
description of the level (`chat`), or the environment's oracle. Words as Beacons (Ruiz-Gonzalez et
al., 2024), and its error model: a subgoal is right with probability `accuracy`.

`Subgoals` adds the active subgoal to the observations. The policy does not see it (the reward adds
`privileged/subgoal`), unless the environment shows it (`ObservedSubgoals` adds `subgoal`). The
reward fills `subgoal` while the policy trains and withdraws it from a rising share of episodes;
with `withdrawn: 1` the environment by itself, as in the evaluation, has none.

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
from embodied.core.env import HasSubgoals, StateRoles, Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import SUBGOAL, SYMBOL, Leaf, Spec
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

    def highest(self, spec: Spec) -> Code:
        """The largest symbols of `seen` in an environment of this spec."""
        ...

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

    def seen(self, codes: Tensor, whole: Tensors) -> Tensor:
        """Each env's subgoal [B, 3] as the agent sees it, in symbols [B, 3]."""
        ...


class Planner(Remembered):
    """Makes subgoal lists. `count`: lists, subgoals named, null (not in the level), wrong (error
    model), cut (beyond `most`), empty lists, unanswered requests.

    The language model is asked in the background; `synchronous`: the environment waits for it.
    `withdrawn`: share of episodes without subgoals.
    """

    remembered = ("count", "answers", "missed", "requested", "withdrawn")

    def __init__(
        self,
        kind: Kind,
        accuracy: float,
        most: int,
        chat: Chat | None,
        seed: int,
        folder: Path,
        synchronous: bool = False,
        withdrawn: float = 0.0,
    ) -> None:
        self.withdrawn = withdrawn
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

    def withdraws(self, env_id: int, episode: int) -> bool:
        """Whether this episode of an env is one without subgoals, as the seed determines."""
        return random.Random(f"{self.seed} {env_id} {episode}").random() < self.withdrawn

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
HIDDEN = f"privileged/{SUBGOAL}"


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
    withdraw: tuple[CountOrZero, CountOrZero] | None = None  # step of the first and last withdrawal


class SubgoalBonus(Remembered, SummedReward):
    """The bonus is in the transitions; invalid subgoals are counted. Between the two steps
    `withdraw` the share of episodes without subgoals and bonus rises from 0 to 1.

    `folder/plans.jsonl` has every list of a language model, with prompt and provenance; levels with
    the same description are requested once.
    """

    frozen = False
    remembered = ("planner", "reached", "episodes")

    def __init__(self, config: Config, seed: int, folder: Path) -> None:
        if config.withdraw is not None and config.withdraw[0] >= config.withdraw[1]:
            raise ConfigError("reward.withdraw: its first step has to be before its last one")
        self.config = config
        self.needs_local_env = config.withdraw is not None
        self.planner = planner_of(config, seed, folder)
        self.reached = self.episodes = 0

    def set_step(self, step: int) -> None:
        if self.config.withdraw is not None:
            first, last = self.config.withdraw
            self.planner.withdrawn = min(max((step - first) / (last - first), 0.0), 1.0)

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with the bonus of every step; ConfigError if it has no subgoals."""
        config = self.config
        key = SUBGOAL if SUBGOAL in env.spec.obs else HIDDEN
        listed = Subgoals(env, self.planner, key)
        limit = listed.guide.limit if config.limit is None else config.limit
        if limit < 1:
            raise ConfigError("the episode limit depends on the mission: set reward.limit")
        if env.spec.obs.get(key) not in (None, listed.spec.obs[key]):
            raise ConfigError(f"reward.most={config.most} is not that of the subgoals env shows")
        return SubgoalBonusWrapper(listed, key, config.bonus, limit)

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
            "withdrawn": self.planner.withdrawn,
        }
        self.reached = self.episodes = 0
        return {name: torch.tensor(float(value)) for name, value in facts.items()}


class Subgoals(ObservationWrapper):
    """Adds the active subgoal of each env as symbols [B, 4]: its number in the list from 1 (0: none
    is active, and the others are 0), and what the agent sees of it (`Guide.seen`). Its memory holds
    each env's list, the number of the active subgoal, and how many episodes began.

    A list that a language model makes later than the episode begins is used from then on.
    """

    newest = "subgoal"
    memory_roles = StateRoles(generators={"episode": None})

    def __init__(self, env: VecEnv, planner: Planner, key: str) -> None:
        source = find_protocol(env, HasSubgoals)
        if source is None:
            raise ConfigError("this environment has no subgoals; MiniGrid has")
        if not {"privileged/grid", "privileged/agent"} <= env.spec.obs.keys():
            raise ConfigError(
                "subgoals need the whole level as an observation: env.privileged=true"
            )
        self.guide: Guide = source.subgoals()
        high = (planner.most, *self.guide.highest(env.spec))
        super().__init__(env, key, Leaf((4,), "int64", 0, high, SYMBOL))
        self.planner = planner
        self.every = torch.arange(self.num_envs, device=self.device)
        self.whole: Tensors = {}
        self.late: dict[int, Tensors] = {}  # the initial states of envs without a list yet

    def step(self, action: Tensor) -> Step:
        self._late_plans()
        return super().step(action)

    def observe(self, following: Tensors) -> Tensor:
        memory, after = self.memory, under(following, "privileged")
        active = memory["active"]
        hit = (active < memory["length"]) & self.guide.reached(self._codes(), self.whole, after)
        memory["active"] = active + hit
        memory["subgoal"] = self._seen(after)
        return memory["subgoal"]

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
            plan = zero[:, None, None].repeat(1, self.planner.most, 3)
            self.memory = {"plan": plan, "length": zero, "active": zero, "episode": zero}
        memory = {key: value.clone() for key, value in self.memory.items()}
        memory["episode"] += rows
        started = {key: value.clone() for key, value in under(obs, "privileged").items()}
        for env_id in rows.nonzero().flatten().tolist():
            memory["active"][env_id] = 0
            codes: list[Code] | None = []
            if not self.planner.withdraws(env_id, int(memory["episode"][env_id])):
                codes = self.planner.plan(self.guide, started, env_id)
            self._set_plan(memory, env_id, codes or [])
            self.late.pop(env_id, None)
            if codes is None:
                self.late[env_id] = started
        self.memory = memory
        memory["subgoal"] = self._seen(started)

    def _codes(self) -> Tensor:
        """The active subgoals [B, 3]; where none is active, any."""
        active = self.memory["active"].clamp(max=self.planner.most - 1)
        return self.memory["plan"][self.every, active]

    def _seen(self, whole: Tensors) -> Tensor:
        active = self.memory["active"][:, None]
        seen = torch.cat([active + 1, self.guide.seen(self._codes(), whole)], 1)
        return seen * (active < self.memory["length"][:, None])

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


class SubgoalBonusWrapper(ObservationWrapper):
    """Adds the bonus of the step that led to an observation, of the subgoals `key`. Its memory has
    the steps since the last one."""

    newest = "bonus"

    def __init__(self, env: Subgoals, key: str, bonus: float, limit: int) -> None:
        super().__init__(env, BONUS, Leaf((), low=0.0))
        self.subgoal = key
        self.bonus = bonus
        self.limit = limit
        self.before = torch.zeros(0)  # numbers of the active subgoals [B]

    def observe(self, following: Tensors) -> Tensor:
        age = self.memory["age"] + 1
        hit = (self.before > 0) & (following[self.subgoal][:, 0] != self.before)
        bonus = self.bonus * hit * (1 - age.float() / self.limit).clamp(min=0)
        self.memory = {"age": age.masked_fill(hit, 0), "bonus": bonus}
        return bonus

    def begin(self, obs: Tensors, rows: Tensor) -> None:
        zero = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        memory = self.memory or {"age": zero, "bonus": zero.float()}
        self.memory = {name: value.masked_fill(rows, 0) for name, value in memory.items()}

    def transform_obs(self, obs: Tensors) -> Tensors:
        self.before = obs[self.subgoal][:, 0]
        return super().transform_obs(obs)


@dataclass(frozen=True)
class ObservedConfig(PlanConfig):
    """Settings of observed subgoals."""

    seed: CountOrZero = 0  # decides which subgoals are wrong, and which episodes have none
    plans: str = "outputs/subgoals"  # folder in which a language model's lists are written
    withdrawn: Fraction = 0.0  # share of episodes without; 1: reward=subgoal_bonus alone names them


class ObservedSubgoals(Subgoals):
    """Adds the observation `subgoal`. The reward stays the environment's."""

    def __init__(self, config: ObservedConfig, env: VecEnv) -> None:
        planner = planner_of(config, config.seed, Path(config.plans))
        planner.withdrawn = config.withdrawn
        super().__init__(env, planner, SUBGOAL)
