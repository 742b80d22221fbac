"""Practice: a world that is never put back goes on and on; what a step does between two episodes.

The world (a `Ground`) never ends by itself. Here episodes end (envs.practice_states), and before
the step returns, whatever has to happen without the learner happens: a primitive frees what is
stuck, an arm goes home, a task that has a script of its own (`played`) is played. Steps of those
are not counted, not shown and not learned from. What no primitive can mend is put right by the
world's `reset`: in simulation for nothing, on a robot by a person; `log["manual"]` says when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.build import ConfigError, Node, build
from embodied.core.env import Step, VecEnv
from embodied.core.tensors import Tensors, where
from embodied.core.wrapper import Wrapper
from envs import practice_states
from envs.practice_states import Facts, Mode, States
from envs.wrapper import copied


class Ground(Protocol):
    """What is practised on: a VecEnv whose rows never end by themselves (or only because somebody
    had to come), with goals to go to one after the other."""

    goal: Tensor
    """[B] (int64): the number of the goal that each row is on its way to."""

    def facts(self) -> Facts:
        """Of all rows, as they are now."""
        ...

    def advance(self, rows: Tensor) -> None:
        """From now on `rows` [B] (bool) are on their way to their next goals."""
        ...

    def rehome(self, rows: Tensor) -> None:
        """What the robot can do by itself before another episode (an arm goes home), `rows` [B]."""
        ...

    def look(self) -> Tensors:
        """The observations of all rows as they are now."""
        ...


@dataclass(frozen=True)
class Config:
    """`states`: of the state machine; `primitive`: a policy's node, what is done to get free
    (None: the robot goes home); `played`: by the number of a goal, policies' nodes of what has a
    script; `par`: steps within which a lap counts as success (None: any number). `resets`
    "free": no practising; after every episode the world is put back (what it is compared with)."""

    states: practice_states.Config = field(default_factory=practice_states.Config)
    primitive: Node | None = None
    played: Mapping[str, Node] = field(default_factory=dict[str, Node])
    par: int | None = None
    resets: Literal["none", "free"] = "none"


class Practice(Wrapper):
    """`log`: `success` (a lap within `par`), `manual`, `stuck`, `late`, `crashed`, and `aside`, the
    steps that were taken between this episode and the next."""

    def __init__(self, config: Config, env: VecEnv) -> None:
        super().__init__(env)
        self.config = config
        missing = [name for name in ("facts", "advance", "look") if not hasattr(env, name)]
        if missing:
            raise ConfigError(
                f"nobody can practise in {type(env).__name__}: it has no {missing[0]}"
            )
        self.ground = cast(Ground, env)
        self.states: States | None = None
        self.actor = self._actor(config.primitive)
        self.played = {int(k): self._actor(node) for k, node in config.played.items()}

    def _actor(self, node: Node | None) -> Callable[[], Actor] | None:
        if node is None:
            return None
        policy = build(node, spec=self.env.spec).eval()
        return lambda: Actor(policy, self.num_envs)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Somebody has put `mask` [B] right."""
        obs = self.env.reset(seed, task, mask)
        rows = self.rows(mask)
        states = self._machine()
        states.begin(rows)
        self.memory["length"] = self.memory["length"].masked_fill(rows, 0)
        return self._play(obs, rows)[0]

    def step(self, action: Tensor) -> Step:
        step, states = self.env.step(action), self._machine()
        now = self.ground.facts()
        facts = Facts(now.place, now.reached, now.crashed, now.lost | step.ended)
        verdict = states.learn(facts)
        self.memory["length"] = self.memory["length"] + 1
        par = self.config.par
        quick = verdict.won if par is None else verdict.won & (self.memory["length"] <= par)
        ended = verdict.ended
        self.memory["length"] = self.memory["length"].masked_fill(ended, 0)
        manual = states.rows(Mode.ERRORED)
        obs, aside, following = step.obs, torch.zeros(self.num_envs), step.next_obs
        if bool(ended.any()) or bool(facts.reached.any()):
            following = copied(step.next_obs)  # on its way to the goal that it had
            if bool((ended & ~step.ended).any()):
                self.leaving(ended & ~step.ended)
            obs, aside, more = self._between(ended, facts.reached)
            manual = manual | more
        log = {k: v for k, v in step.log.items() if k != "success"}
        log |= {"success": quick, "manual": manual, "crashed": facts.crashed}
        log |= {"stuck": verdict.stuck, "late": verdict.late, "aside": aside}
        return replace(
            step,
            obs=obs,
            next_obs=following,
            terminated=verdict.terminated,
            truncated=verdict.truncated,
            log=log,
        )

    def _machine(self) -> States:
        """Made when the first facts are there: they say how many numbers a place has."""
        if self.states is None:
            dims = self.ground.facts().place.shape[1]
            self.states = States(self.config.states, self.num_envs, dims, self.memory)
            self.memory["length"] = torch.zeros(self.num_envs, dtype=torch.int64)
        return self.states

    def _between(self, ended: Tensor, reached: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        """Observations to go on from; steps that were taken; where somebody had to come."""
        states, ground = self._machine(), self.ground
        if self.config.resets == "free" and bool(ended.any()):
            ground.advance(reached & ~ended)
            states.begin(ended)
            nothing = torch.zeros(self.num_envs)
            return self.env.reset(mask=ended), nothing, torch.zeros_like(ended)
        aside = torch.zeros(self.num_envs)
        ground.advance(reached)
        obs = self._mended(states)
        stuck = states.rows(Mode.RECOVERY)
        if bool(stuck.any()) and self.actor is not None:
            obs = self._alone(stuck, self.actor(), self.config.states.recovery)
            aside = aside + self.config.states.recovery * stuck
        states.recovered()
        if bool(ended.any()):
            ground.rehome(ended)
            obs = ground.look()
        obs, more, manual = self._play(obs, ended)
        return obs, aside + more, manual

    def _mended(self, states: States) -> Tensors:
        """Somebody puts right what no primitive can."""
        errored = states.rows(Mode.ERRORED)
        if not bool(errored.any()):
            return self.ground.look()
        states.begin(errored)
        return self.env.reset(mask=errored)

    def _play(self, obs: Tensors, rows: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        """Goals that have a script are gone to, until one has not: in `rows` [B], one by one."""
        aside, manual = torch.zeros(self.num_envs), torch.zeros(self.num_envs, dtype=torch.bool)
        if not self.played:
            return obs, aside, manual
        for row in rows.nonzero().flatten().tolist():
            failed = 0
            while (goal := int(self.ground.goal[row])) in self.played:
                only = torch.arange(self.num_envs) == row
                obs, steps, there = self._played(only, goal)
                aside[row] += steps
                failed = 0 if there else failed + 1
                if there:
                    self.ground.advance(only)
                elif failed > self.config.states.tries:
                    if bool(manual[row]):
                        raise ConfigError(f"the script of goal {goal} does not get there (played)")
                    manual, failed = manual | only, 0
                    obs = self.env.reset(mask=only)
                self.ground.rehome(only)
                obs = self.ground.look()
        return obs, aside, manual

    def _played(self, only: Tensor, goal: int) -> tuple[Tensors, int, bool]:
        """One try of a script in the row `only` [B]: observations, steps, whether it got there."""
        make = self.played[goal]
        assert make is not None
        taken = {"steps": 0}

        def over() -> bool:
            taken["steps"] += 1
            facts = self.ground.facts()
            return bool((facts.reached | facts.lost)[only].all())

        obs = self._alone(only, make(), self.config.states.timeout, over)
        return obs, taken["steps"], bool(self.ground.facts().reached[only].all())

    def _alone(
        self,
        rows: Tensor,
        actor: Actor,
        steps: int,
        over: Callable[[], bool] = lambda: False,
    ) -> Tensors:
        """`actor` plays up to `steps` in `rows` [B]; the others stay as they are."""
        others = None if bool(rows.all()) else self.env.get_state()
        obs, first = self.ground.look(), torch.ones_like(rows)
        for _ in range(steps):
            step = self.env.step(actor(obs, first))
            obs, first = step.obs, step.ended
            if over():
                break
        if others is not None:
            obs = self.env.set_state(where(rows, self.env.get_state(), others))
        return obs

    def set_state(self, state: Tensors) -> Tensors:
        states = self._machine()
        obs = super().set_state(state)
        states.memory = self.memory
        return obs

    def get_state(self) -> dict[str, Any]:
        self._machine()
        return super().get_state()
