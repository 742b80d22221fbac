"""Auto MC-Reward: a designer, a critic, and a trajectory analyser (Li et al., 2023).

    r = sgn(sparse) + 0.1 sgn(dense)

The designer writes `sparse` and `dense`; taking signs bounds the effect of errors. The critic, a
second request, gets the program and its results on stored transitions (rejections, how often dense
is positive and negative), up to three times. After training, the analyser gets the last steps of
failed episodes, and its advice goes into the next round. Unlike in the paper, programs are
stateless.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

import torch

from embodied.core import checkpoint
from embodied.core import tensors as tt
from embodied.core.actor import Actor
from embodied.core.bounds import Count, CountOrZero, NonNegative
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.saved_node import read_run_settings
from embodied.core.tensors import Tensors
from embodied.llm.ask_pool import ask_all
from embodied.llm.chat import Chat, ChatError, Message
from embodied.reward_design import prompts
from embodied.reward_design.description import describe
from embodied.reward_design.designer import Board, Designer, Proposal
from embodied.reward_design.designers.eureka import newest_best
from embodied.reward_design.journal import Candidate
from embodied.rewards.handcrafted.program import Variable
from embodied.sandbox.program import defined, required

WIDEST = 4  # most elements of a variable in the digest
LONGEST = 12_000  # characters

FUNCTIONS = ("sparse", "dense")
ENTRY = (
    "First reason about what the task needs, then answer with one code block that holds\n"
    "    def sparse(NAMES OF VARIABLES): ...   # [N]: 1 where the task's aim is met, -1 where "
    "something bad happened, else 0\n"
    "    def dense(NAMES OF VARIABLES): ...    # [N]: positive where a step helped, negative where "
    "it did not\n"
    "Only their signs are used: the reward is sign(sparse) + 0.1 * sign(dense). A dense part that "
    "is always positive says nothing."
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
SCHEMA = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "critique": {"type": "string"}},
    "required": ["good", "critique"],
    "additionalProperties": False,
}
LEAST = 0.01  # share of steps in which dense has either sign


def digests(board: Board, candidate: Candidate, episodes: int, last: int) -> str:
    """The last `last` steps of up to `episodes` failed episodes of a candidate's policy; "" if none
    failed or nothing was trained."""
    folder = board.run(candidate)
    if not any(folder.glob("checkpoints/[0-9]*")):
        return ""
    node = read_run_settings(folder / "run.yaml")
    env = build(node["env"] | {"num_envs": 2 * episodes}, VecEnv)
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
class Config:
    """Settings of Auto MC-Reward."""

    reviews: CountOrZero = 3  # rounds with the critic
    failures: Count = 10  # failed episodes that the analyser gets
    last: Count = 10  # last steps of each of them
    temperature: NonNegative = 0.7  # temperature of the model


class AutoMc(Designer):
    """Needs a language model."""

    def __init__(self, config: Config, chat: Chat) -> None:
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
    given = {name: required(found[name][1]) for name in FUNCTIONS}
    names = list(dict.fromkeys(name for part in given.values() for name in part))
    return (
        f"{source.rstrip()}\n\n\ndef reward({', '.join(names)}):\n"
        f"    met = torch.sign(torch.as_tensor(sparse({', '.join(given['sparse'])})).float())\n"
        f"    way = torch.sign(torch.as_tensor(dense({', '.join(given['dense'])})).float())\n"
        '    return met + 0.1 * way, {"sparse": met, "dense": 0.1 * way}\n'
    )
