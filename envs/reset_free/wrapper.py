"""ResetFreeWrapper: reset-free (autonomous) reinforcement learning.

The inner environment (a `ResetFreeEnv`) never resets by itself. The wrapper ends episodes and,
inside `step`, runs what the learner does not control: a recovery primitive frees a stuck robot, the
robot goes home, and goals with a scripted policy (`played`) are executed. The learner does not
receive these steps. If all of that fails, the inner environment is reset: for free in simulation,
by a person on a real robot; `log["manual"]` counts such resets.

FastRLAP (Stachowicz et al., 2023) keeps a car on its track: checkpoints are goals, and a stuck car
recovers by itself. SERL (Luo et al., 2024) has a backward task that undoes the forward one. Both
are

    LEARNING --- lap, goal reached ------------------------------------> LEARNING (next goal)
        |------- crashed (terminated), stuck or late (truncated) ------> RECOVERY
        |------- too many of those in a row, or an object is lost -----> ERRORED
    RECOVERY --- the primitive has finished its steps -----------------> LEARNING (same goal)
    ERRORED ---- a person has reset the scene -------------------------> LEARNING

FastRLAP's pre-trained image encoder and its state-dependent bound of actions are not here.
An episode ends only for the learner; the physical state is not reset. Steps in RECOVERY are not
used for learning. Stuck and late are truncations (the value is bootstrapped), a crash is a
termination.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, Any, Literal, Protocol, cast

import torch
from torch import Tensor

from embodied.core.actor import Actor
from embodied.core.bounds import Bound, Count, Positive
from embodied.core.build import ConfigError, Node, build
from embodied.core.env import StateRoles, Step, VecEnv
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors, where
from embodied.core.wrapper import Wrapper
from embodied.envs.wrappers.stack import copied
from embodied.policies.scripted.intervener import Intervener


class Mode(IntEnum):
    """Who acts: the learner, the recovery primitive, or no one (waiting for a person)."""

    LEARNING = 0
    RECOVERY = 1
    ERRORED = 2


@dataclass(frozen=True)
class StatesConfig:
    """Settings of the state machine. SERL has `wins` "terminated", a race "truncated"."""

    lap: Count = 1  # goals per episode
    wins: Literal["terminated", "truncated"] = "terminated"  # what the last goal does
    window: Annotated[int, Bound(2)] = 30  # stuck: so many last positions are near the newest
    radius: Positive = 0.3  # stuck: distance that counts as near, m
    timeout: Count = 200  # late: steps without a goal
    recovery: Count = 10  # steps of the primitive
    tries: Count = 10  # recoveries in a row without a goal before a person is needed


@dataclass(slots=True)
class Facts:
    """Facts of n envs after a step: position `place` [n, d] (m) and, [n] (bool), goal `reached`,
    `crashed`, `lost` (an object is out of reach of the primitive, or not measured).
    """

    place: Tensor
    reached: Tensor
    crashed: Tensor
    lost: Tensor


class ResetFreeEnv(Protocol):
    """Protocol of a reset-free environment: a VecEnv whose episodes do not end by themselves
    (except after manual intervention), with a sequence of goals.
    """

    goal: Tensor
    """[B] (int64): the number of the goal that each row is on its way to."""

    def facts(self) -> Facts:
        """The current facts of all envs."""
        ...

    def advance(self, rows: Tensor) -> None:
        """Select the next goal of `rows` [B] (bool)."""
        ...

    def rehome(self, rows: Tensor) -> None:
        """Do what the robot can do by itself before the next episode (an arm moves home), in `rows`
        [B].
        """
        ...

    def look(self) -> Tensors:
        """The current observations of all envs."""
        ...


@dataclass(slots=True)
class Verdict:
    """[n] (bool) each; `won`: the lap is complete; at most one of `terminated` and `truncated` is
    true.
    """

    terminated: Tensor
    truncated: Tensor
    won: Tensor
    stuck: Tensor
    late: Tensor

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


class PracticeStates:
    """The state machine of n envs; its whole state is in `memory` [n, ...], for saving."""

    def __init__(
        self, config: StatesConfig, n: int, dims: int, memory: Tensors | None = None
    ) -> None:
        self.config = config
        self.memory = {} if memory is None else memory
        count = torch.zeros(n, dtype=torch.int64)
        fresh = {name: count.clone() for name in ("mode", "age", "goals", "tries", "kept")}
        fresh["trail"] = torch.zeros(n, config.window, dims)
        self.memory.update(fresh)

    def begin(self, rows: Tensor) -> None:
        """Restart `rows` [n] (bool) after a reset of the scene."""
        for value in self.memory.values():
            value[rows] = 0

    def learn(self, facts: Facts) -> Verdict:
        memory = self.memory
        config = self.config
        trail = torch.cat([facts.place[:, None].to(memory["trail"]), memory["trail"][:, :-1]], 1)
        memory["trail"] = trail
        memory["kept"] = (memory["kept"] + 1).clamp(max=config.window)
        far = (trail - trail[:, :1]).norm(dim=2).amax(1)
        stuck = (memory["kept"] >= config.window) & (far < config.radius) & ~facts.reached
        memory["age"] = torch.where(facts.reached, 0, memory["age"] + 1)
        memory["goals"] = memory["goals"] + facts.reached
        memory["tries"] = memory["tries"].masked_fill(facts.reached, 0)
        crashed = facts.crashed & ~facts.lost
        won = (memory["goals"] >= config.lap) & ~crashed & ~facts.lost
        late = (memory["age"] >= config.timeout) & ~won
        fails = crashed | ((stuck | late) & ~won & ~facts.lost)
        terminated = crashed | (won if config.wins == "terminated" else torch.zeros_like(won))
        truncated = ~terminated & (won | fails | facts.lost)
        memory["tries"] = memory["tries"] + fails
        hopeless = facts.lost | (fails & (memory["tries"] > config.tries))
        mode = torch.where(fails, int(Mode.RECOVERY), int(Mode.LEARNING))
        memory["mode"] = mode.masked_fill(hopeless, int(Mode.ERRORED))
        for name in ("age", "goals", "kept"):
            memory[name] = memory[name].masked_fill(terminated | truncated, 0)
        return Verdict(terminated, truncated, won, stuck & fails, late & fails)

    def recovered(self) -> None:
        mode = self.memory["mode"]
        self.memory["mode"] = mode.masked_fill(mode == Mode.RECOVERY, int(Mode.LEARNING))

    def rows(self, mode: Mode) -> Tensor:
        """[n] (bool)."""
        return self.memory["mode"] == mode


Slew = Annotated[float, Bound(above=0.0, high=2.0)]


@dataclass(frozen=True)
class Config:
    """Settings of reset-free training. `played` are nodes of scripted policies by goal number.

    With a `slew` (FastRLAP), the executed action is `log["executed"]` and is what is learned from;
    the environment should observe its last action. `teleop` controls the robot when recoveries have
    failed, until it releases control.
    """

    states: StatesConfig = field(default_factory=StatesConfig)  # when it is stuck
    primitive: Node | None = None  # node of the recovery policy (null: the robot moves home)
    played: Mapping[str, Node] = field(default_factory=dict[str, Node])  # policies by goal
    par: Count | None = None  # success is a lap within so many steps (null: any number)
    resets: Literal["none", "free"] = "none"  # free: reset after every episode, for comparison
    slew: Slew | None = None  # largest change of an action element per step, of 2 (null: no limit)
    teleop: Node | None = None  # node of an intervener (embodied.policies.scripted.intervener)
    waits: Count = 600  # longest control by `teleop`, in steps


class ResetFreeWrapper(Wrapper):
    """`log`: `success` (a lap within `par`), `manual`, `stuck`, `late`, `crashed`, `aside` (steps
    between this episode and the next); with a `slew` also `executed`.
    """

    memory_roles = StateRoles({"length": None, "age": None})

    def __init__(self, config: Config, env: VecEnv) -> None:
        super().__init__(env)
        self.config = config
        missing = [name for name in ("facts", "advance", "look") if not hasattr(env, name)]
        if missing:
            raise ConfigError(
                f"{type(env).__name__} is not a ResetFreeEnv: it has no method {missing[0]}"
            )
        self.ground = cast(ResetFreeEnv, env)
        self.states: PracticeStates | None = None
        self.actor = self._actor(config.primitive)
        self.played = {int(k): self._actor(node) for k, node in config.played.items()}
        self.person: Intervener | None = None
        if config.teleop is not None:
            self.person = build(config.teleop, Intervener, spec=env.spec, num_envs=env.num_envs)

    def _actor(self, node: Node | None) -> Callable[[], Actor] | None:
        if node is None:
            return None
        policy = build(node, Policy, spec=self.env.spec).eval()
        return lambda: Actor(policy, self.num_envs)

    def reset(
        self, seed: int | None = None, task: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensors:
        """Reset the envs `mask` [B] (a person has reset the scene)."""
        obs = self.env.reset(seed, task, mask)
        rows = self.rows(mask)
        states = self._state_machine()
        states.begin(rows)
        self.memory["length"] = self.memory["length"].masked_fill(rows, 0)
        return self._play_scripts(obs, rows)[0]

    def step(self, action: Tensor) -> Step:
        states = self._state_machine()
        if (slew := self.config.slew) is not None:
            last = self.memory["last"]  # after a reset 0
            action = last + (action.clamp(-1, 1) - last).clamp(-slew, slew)
        step = self._remembered_step(action)
        now = self.ground.facts()
        facts = Facts(now.place, now.reached, now.crashed, now.lost | step.ended)
        verdict = states.learn(facts)
        self.memory["length"] = self.memory["length"] + 1
        par = self.config.par
        quick = verdict.won if par is None else verdict.won & (self.memory["length"] <= par)
        ended = verdict.ended
        self.memory["length"] = self.memory["length"].masked_fill(ended, 0)
        manual = states.rows(Mode.ERRORED)
        obs = step.obs
        aside = torch.zeros(self.num_envs)
        following = step.next_obs
        if bool(ended.any()) or bool(facts.reached.any()):
            following = copied(step.next_obs)  # observed with the previous goal
            if bool((ended & ~step.ended).any()):
                self._notify_before_reset(ended & ~step.ended)
            obs, aside, more = self._between_episodes(ended, facts.reached)
            manual = manual | more
        log = {k: v for k, v in step.log.items() if k != "success"}
        log |= {"success": quick, "manual": manual, "crashed": facts.crashed}
        log |= {"stuck": verdict.stuck, "late": verdict.late, "aside": aside}
        if self.config.slew is not None:
            log["executed"] = action
        return replace(
            step,
            obs=obs,
            next_obs=following,
            terminated=verdict.terminated,
            truncated=verdict.truncated,
            log=log,
        )

    def _state_machine(self) -> PracticeStates:
        """Made when the first facts are there: they say how many numbers a place has."""
        if self.states is None:
            dims = self.ground.facts().place.shape[1]
            self.states = PracticeStates(self.config.states, self.num_envs, dims, self.memory)
            self.memory["length"] = torch.zeros(self.num_envs, dtype=torch.int64)
            if self.config.slew is not None:
                self.memory["last"] = torch.zeros(self.num_envs, *self.spec.act.shape)
        return self.states

    def _remembered_step(self, action: Tensor) -> Step:
        if "last" in self.memory:
            self.memory["last"] = action.clone()
        return self.env.step(action)

    def _between_episodes(self, ended: Tensor, reached: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        """Observations to go on from; steps that were taken; where somebody had to come."""
        states = self._state_machine()
        ground = self.ground
        if self.config.resets == "free" and bool(ended.any()):
            ground.advance(reached & ~ended)
            states.begin(ended)
            return self.env.reset(mask=ended), torch.zeros(self.num_envs), torch.zeros_like(ended)
        ground.advance(reached)
        obs, aside = self._call_person(states)
        stuck = states.rows(Mode.RECOVERY)
        if bool(stuck.any()) and self.actor is not None:
            obs = self._play_rows(stuck, self.actor(), self.config.states.recovery)
            aside = aside + self.config.states.recovery * stuck
        states.recovered()
        if bool(ended.any()):
            ground.rehome(ended)
            obs = ground.look()
        obs, more, manual = self._play_scripts(obs, ended)
        return obs, aside + more, manual

    def _call_person(self, states: PracticeStates) -> tuple[Tensors, Tensor]:
        """Somebody puts right what no primitive can: observations, and steps that it took."""
        errored = states.rows(Mode.ERRORED)
        aside = torch.zeros(self.num_envs)
        if not bool(errored.any()):
            return self.ground.look(), aside
        left = errored
        if self.person is not None and bool((stuck := errored & ~self.ground.facts().lost).any()):
            print("stuck for good: drive it free, and let go", file=sys.stderr, flush=True)
            steps, done = self._let_person_control(self.person, stuck)
            aside = aside + steps * stuck
            left = errored & ~(done & stuck)
        states.begin(errored)
        return (self.env.reset(mask=left) if bool(left.any()) else self.ground.look()), aside

    def _let_person_control(self, person: Intervener, rows: Tensor) -> tuple[int, Tensor]:
        """Let `person` control `rows` [B] until they let go; returns the steps, and where [B] they
        did."""
        came = person.over(self.ground.look(), rows) & rows
        done = torch.zeros_like(rows)
        steps = 0

        def over() -> bool:
            nonlocal came, done, steps
            steps += 1
            held = person.over(self.ground.look(), torch.zeros_like(rows))
            came, done = came | held, done | (came & ~held)
            return bool(done[rows].all())

        self._play_rows(rows, person.act, self.config.waits, over)
        return steps, done

    def _play_scripts(self, obs: Tensors, rows: Tensor) -> tuple[Tensors, Tensor, Tensor]:
        """Goals that have a script are gone to, until one has not: in `rows` [B], one by one."""
        aside = torch.zeros(self.num_envs)
        manual = torch.zeros(self.num_envs, dtype=torch.bool)
        if not self.played:
            return obs, aside, manual
        for row in rows.nonzero().flatten().tolist():
            failed = 0
            while (goal := int(self.ground.goal[row])) in self.played:
                only = torch.arange(self.num_envs) == row
                obs, steps, there = self._try_script(only, goal)
                aside[row] += steps
                failed = 0 if there else failed + 1
                if there:
                    self.ground.advance(only)
                elif failed > self.config.states.tries:
                    if bool(manual[row]):
                        raise ConfigError(
                            f"played: the scripted policy of goal {goal} did not reach the goal"
                        )
                    manual = manual | only
                    failed = 0
                    obs = self.env.reset(mask=only)
                self.ground.rehome(only)
                obs = self.ground.look()
        return obs, aside, manual

    def _try_script(self, only: Tensor, goal: int) -> tuple[Tensors, int, bool]:
        """One try of a script in the row `only` [B]: observations, steps, whether it got there."""
        make = self.played[goal]
        assert make is not None
        taken = {"steps": 0}

        def over() -> bool:
            taken["steps"] += 1
            facts = self.ground.facts()
            return bool((facts.reached | facts.lost)[only].all())

        obs = self._play_rows(only, make(), self.config.states.timeout, over)
        return obs, taken["steps"], bool(self.ground.facts().reached[only].all())

    def _play_rows(
        self,
        rows: Tensor,
        actor: Callable[[Tensors, Tensor], Tensor],
        steps: int,
        over: Callable[[], bool] = lambda: False,
    ) -> Tensors:
        """Let `actor` play up to `steps` in `rows` [B]; the others stay as they are."""
        others = None if bool(rows.all()) else self.env.get_state()
        last = self.memory.get("last")
        obs = self.ground.look()
        first = torch.ones_like(rows)
        for _ in range(steps):
            step = self._remembered_step(actor(obs, first))
            obs = step.obs
            first = step.ended
            if over():
                break
        if others is not None:
            obs = self.env.set_state(where(rows, self.env.get_state(), others))
            if last is not None:
                self.memory["last"] = torch.where(rows[:, None], self.memory["last"], last)
        return obs

    def set_state(self, state: Tensors) -> Tensors:
        states = self._state_machine()
        obs = super().set_state(state)
        states.memory = self.memory
        return obs

    def get_state(self) -> dict[str, Any]:
        self._state_machine()
        return super().get_state()
