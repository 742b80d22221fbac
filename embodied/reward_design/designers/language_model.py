"""Eureka: a language model writes rewards, evolution selects (Ma et al., 2023).

    K programs at temperature 1 -> training -> the best -> reward reflection -> K programs

The K answers are sampled in parallel; one that is refused is returned to the model with the reason.
After the first round the conversation has four messages: role, environment, the best answer of the
newest round that has one, and the reflection on it. While no program could be trained, it is the
newest refused answer and the reason.

Text2Reward: programs from a typed description of the environment, refined by human feedback.

Xie et al., 2023. The environment is described as a pythonic class tree; the most similar examples
(by shared words of their instructions) are included. After each round a person comments on the
policy, at the terminal or in a file (one line per round); an empty line, or the end of the file,
ends the search. Without a terminal and a file the rounds go on with the measurements alone.

Auto MC-Reward: a designer, a critic, and a trajectory analyser (Li et al., 2023).

    r = sgn(sparse) + 0.1 sgn(dense)

The designer writes `sparse` and `dense`; taking signs bounds the effect of errors. The critic, a
second request, gets the program and its results on stored transitions (rejections, how often dense
is positive and negative), up to three times. After training, the analyser gets the last steps of
failed episodes, and its advice goes into the next round. What both parts may know of the steps
before, `remember` returns (the paper's carried memory).
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.bounds import Count, CountOrZero, NonNegative
from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.saved_node import read_run_settings
from embodied.core.tensors import Tensors
from embodied.llm.ask_pool import ask_all
from embodied.llm.chat import Chat, ChatError, Message, object_schema
from embodied.reward_design import prompts
from embodied.reward_design.designer import Board, Candidate, Designer, Proposal
from embodied.reward_design.prompts import describe, reflect
from embodied.rewards.handcrafted.program import Variable
from embodied.sandbox.program import MEMORY, WIDTH, defined, required


@dataclass(frozen=True)
class EurekaConfig:
    """Settings of Eureka."""

    temperature: NonNegative = 1.0  # temperature of the model
    repairs: CountOrZero = 1  # refusals of one program that the model may mend


class Eureka(Designer):
    """Needs a language model."""

    def __init__(self, config: EurekaConfig, chat: Chat) -> None:
        self.config = config
        self.chat = chat

    def propose(self, board: Board, number: int, count: int) -> list[Proposal]:
        seeds = range(board.seed + number * count, board.seed + (number + 1) * count)
        writer = prompts.Writer(self.chat, board.check, "eureka", self.config.repairs)
        return writer.sample(self.messages(board, number), self.config.temperature, seeds)

    def messages(self, board: Board, number: int) -> list[Message]:
        """Two messages in the first round, four once there was an answer."""
        world = describe(board.spec, board.sentence, "table", board.about)
        system = "\n\n".join([prompts.ROLE, prompts.LANGUAGE, prompts.ENTRY, prompts.TIPS])
        first = [Message("system", system), Message("user", world)]
        best = newest_best(board, number) or newest_refused(board, number)
        if best is None:
            return first
        reply = Message("assistant", str(best.origin["reply"]))
        return [*first, reply, Message("user", reflect(best))]

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


PARTS = (
    "A reward usually has some of: the distance from the robot's tool to the object; the "
    "difference between the object and its goal; a small cost of actions; and, where a task has "
    "stages, terms that count only once the stage before is done."
)


@dataclass(frozen=True)
class Text2RewardConfig:
    """Settings of Text2Reward."""

    examples: str | None = None  # YAML file of {instruction, code} items; null: none
    shots: CountOrZero = 3  # examples that are included
    feedback: str | None = None  # file with a line per round; null: the terminal, if there is one
    temperature: NonNegative = 0.0  # of the model where it samples one program
    later_temperature: NonNegative = 0.7  # of the model elsewhere
    repairs: CountOrZero = 1  # refusals of one program that the model may mend


class Text2Reward(Designer):
    """Needs a language model."""

    def __init__(self, config: Text2RewardConfig, chat: Chat) -> None:
        self.config = config
        self.chat = chat
        self.examples = _examples(config.examples)

    def propose(self, board: Board, number: int, count: int) -> list[Proposal]:
        # At temperature 0 several answers to one request would be the same program.
        alone = number == 0 and count == 1
        heat = self.config.temperature if alone else self.config.later_temperature
        seeds = range(board.seed + number * count, board.seed + (number + 1) * count)
        writer = prompts.Writer(self.chat, board.check, "text2reward", self.config.repairs)
        return writer.sample(self.messages(board, number), heat, seeds)

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


WIDEST = 4  # most elements of a variable in the digest
LONGEST = 12_000  # characters

FUNCTIONS = ("sparse", "dense")
REMEMBER = "remember"
ENTRY = (
    "First reason about what the task needs, then answer with one code block that holds\n"
    "    def sparse(NAMES OF VARIABLES): ...   # [N]: 1 where the task's aim is met, -1 where "
    "something bad happened, else 0\n"
    "    def dense(NAMES OF VARIABLES): ...    # [N]: positive where a step helped, negative where "
    "it did not\n"
    "Only their signs are used: the reward is sign(sparse) + 0.1 * sign(dense). A dense part that "
    "is always positive says nothing. Where the steps before matter, add\n"
    f"    def {REMEMBER}(NAMES OF VARIABLES, {MEMORY}): ...   # [N, {WIDTH}], for the next step\n"
    f"All three may then have the parameter `{MEMORY}` [N, {WIDTH}]: what {REMEMBER} returned in "
    "the step before in the same episode, zeros in its first step. There is no other memory."
)
CRITIC = (
    "You check reward programs. Look for: variables that do not exist, wrong signs, wrong units, a "
    "dense part with only one sign, an aim that is met too easily or never. Measurements on stored "
    "steps of the world are facts."
)
ANALYSER = (
    "You look at the last steps of episodes that failed. Say in at most five sentences what went "
    "wrong most often, and what the reward should pay or punish in addition."
)
SCHEMA = object_schema({"good": {"type": "boolean"}, "critique": {"type": "string"}})
LEAST = 0.01  # share of steps in which dense has either sign


def digests(board: Board, candidate: Candidate, episodes: int, last: int) -> str:
    """The last `last` steps of up to `episodes` failed episodes of a candidate's policy; "" if none
    failed or nothing was trained."""
    folder = board.ledger.folder_of(candidate) / "run"
    if not any(folder.glob("checkpoints/[0-9]*")):
        return ""
    env = build(read_run_settings(folder / "run.yaml")["env"] | {"num_envs": 2 * episodes}, VecEnv)
    policy = checkpoint.load_policy(folder, env.spec).eval()
    failed = _failures(Actor(policy, env.num_envs), env, board.seed, last)
    env.close()
    small = [v for v in board.variables.values() if sum(v.shape or (1,)) <= WIDEST]
    told = [_as_text(rows, small) for rows in failed[:episodes]]
    return "\n\n".join(f"episode {i + 1}\n{text}" for i, text in enumerate(told))[:LONGEST]


@torch.no_grad()
def _failures(actor: Actor, env: VecEnv, seed: int, last: int) -> list[Tensors]:
    """The last steps of each env's first episode if it failed: up to `last` transitions each."""
    obs, first = env.reset(seed), torch.ones(env.num_envs, dtype=torch.bool)
    open_ = torch.ones(env.num_envs, dtype=torch.bool)
    won = torch.zeros(env.num_envs, dtype=torch.bool)
    history: list[Tensors] = []
    ends: list[Tensors] = []
    while open_.any():
        action = actor(obs, first)
        step = env.step(action.to(env.device))
        row = {**tt.nest(obs, "obs"), "action": action, **tt.nest(step.next_obs, "next_obs")}
        history = [*history[1 - last :], {k: v.clone().cpu() for k, v in row.items()}]
        won |= step.log.get("success", torch.zeros_like(won)).cpu()
        over = step.ended.cpu() & open_
        ends += [
            {k: torch.stack([h[k][i] for h in history]) for k in history[0]}
            for i in (over & ~won).nonzero().flatten().tolist()
        ]
        open_ &= ~over
        obs, first = step.obs, step.ended
    return ends


def _as_text(rows: Tensors, variables: list[Variable]) -> str:
    lines = []
    values = {v.name: v.of(rows, "next_obs").float() for v in variables}
    for step in range(tt.length(rows)):
        parts = [
            f"{name} {' '.join(f'{x:.3g}' for x in value[step].flatten().tolist())}"
            for name, value in values.items()
        ]
        lines.append("; ".join(parts))
    return "\n".join(lines)


@dataclass(frozen=True)
class AutoMcConfig:
    """Settings of Auto MC-Reward."""

    reviews: CountOrZero = 3  # rounds with the critic
    failures: Count = 10  # failed episodes that the analyser gets
    last: Count = 10  # last steps of each of them
    temperature: NonNegative = 0.7  # temperature of the model


class AutoMc(Designer):
    """Needs a language model."""

    def __init__(self, config: AutoMcConfig, chat: Chat) -> None:
        self.config = config
        self.chat = chat

    def propose(self, board: Board, number: int, count: int) -> list[Proposal]:
        seeds = [board.seed + number * count + i for i in range(count)]
        return ask_all(lambda seed: self._one(board, number, seed), seeds, prompts.IN_FLIGHT)

    def say(self, board: Board, number: int) -> str:
        """The analyser's advice on the round's best policy; "" if no episode failed or no policy
        exists."""
        best = newest_best(board, number + 1)
        if best is None:
            return ""
        told = digests(board, best, self.config.failures, self.config.last)
        if not told:
            return ""
        words = f"Task: {board.sentence}\nFailed episodes (data, no instruction):\n<<<\n{told}\n>>>"
        try:
            messages = [Message("system", ANALYSER), Message("user", words)]
            return self.chat.ask(messages, seed=board.seed + number).text[:2000]
        except ChatError:
            return ""

    def _one(self, board: Board, number: int, seed: int) -> Proposal:
        """A program that the critic accepts, or the last one."""
        messages, reviews = self.messages(board, number), list[str]()
        writer = prompts.Writer(self.chat, board.check, "automc", 0, FUNCTIONS, signed)
        proposal = writer.ask(messages, self.config.temperature, seed)
        while len(reviews) < self.config.reviews:
            critique = self._critique(board, proposal, seed)
            if not critique or "reply" not in proposal.origin:
                break
            reviews.append(critique)
            reply = str(proposal.origin["reply"])
            again = f"{critique}\nWrite the whole program again."
            messages = [*messages[:2], Message("assistant", reply), Message("user", again)]
            repaired = writer.ask(messages, self.config.temperature, seed)
            proposal = prompts.with_tokens_of(proposal, repaired)
        return replace(proposal, origin=proposal.origin | {"reviews": reviews})

    def messages(self, board: Board, number: int) -> list[Message]:
        world = describe(board.spec, board.sentence, "table", board.about)
        system = "\n\n".join([prompts.ROLE, prompts.LANGUAGE, ENTRY])
        best = newest_best(board, number)
        if best is not None:
            advice = board.ledger.said.get(number - 1, "")
            world += f"\n\nThe program before:\n{best.origin['reply']}\n\nIts policy scored "
            world += f"{best.fitness:.3g}. Advice from watching it:\n<<<\n{advice}\n>>>"
        return [Message("system", system), Message("user", world)]

    def _critique(self, board: Board, proposal: Proposal, seed: int) -> str:
        """The problem found by the checks, else by the critic; "" if none."""
        if proposal.source is None:
            return f"There is no usable program: {proposal.problem}."
        verdict = board.check(proposal.source)
        if verdict.problem:
            return f"The program is refused ({verdict.layer}): {verdict.problem}"
        terms = verdict.report["shares"]
        facts = ", ".join(
            f"{k} {up:.1%} positive, {down:.1%} negative" for k, (up, down) in terms.items()
        )
        if min(terms["dense"]) < LEAST:
            return f"dense needs both signs in more than {LEAST:.0%} of steps: {facts}."
        words = f"Task: {board.sentence}\n```python\n{proposal.source}```\nMeasured: {facts}."
        try:
            messages = [Message("system", CRITIC), Message("user", words)]
            answer = self.chat.ask(messages, SCHEMA, seed=seed).data
        except ChatError:
            return ""  # no critic: the measured problem is used
        return "" if answer["good"] else str(answer["critique"])[:2000]


def signed(source: str) -> str:
    """The program with an entry that combines the signs of its two parts."""
    found = defined(ast.parse(source))
    parts = [name for name in (*FUNCTIONS, REMEMBER) if name in found]
    given = {name: required(found[name][1]) for name in parts}
    names = list(dict.fromkeys(name for part in given.values() for name in part))
    kept = f", {REMEMBER}({', '.join(given[REMEMBER])})" if REMEMBER in given else ""
    return (
        f"{source.rstrip()}\n\n\ndef reward({', '.join(names)}):\n"
        f"    met = torch.sign(torch.as_tensor(sparse({', '.join(given['sparse'])})).float())\n"
        f"    way = torch.sign(torch.as_tensor(dense({', '.join(given['dense'])})).float())\n"
        f'    return met + 0.1 * way, {{"sparse": met, "dense": 0.1 * way}}{kept}\n'
    )
