"""Checks of an environment: shapes and dtypes, seeds, ends of episodes, actions, saved states."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from embodied.checks.check import checks_of, require, skip
from embodied.core import env_contract
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, Node, build
from embodied.core.env import NotSavable, VecEnv
from embodied.core.env_contract import (
    errors_in_one_line,
    innermost,
    playable,
    random_actions,
    wrong,
)
from embodied.core.errors import ContractError, ContractWarning
from embodied.core.spec import MASK

NUM_ENVS = 2
SEEDED_STEPS = 4
MASKED_STEPS = 30


@dataclass
class EnvSubject:
    """An environment's node; the other two are spent on waiting for the end of an episode."""

    node: Node
    most_steps: int = 2_000
    most_seconds: float = 20.0

    @cached_property
    def env(self) -> VecEnv:
        """The environment with two parallel envs."""
        return build({**self.node, "num_envs": NUM_ENVS}, VecEnv)

    def close(self) -> None:
        """Close the environment, if it was built."""
        if "env" in vars(self):
            self.env.close()


@contextmanager
def opened(subject: EnvSubject) -> Iterator[VecEnv]:
    """The environment; exceptions of its code become one line, warnings about it are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ContractWarning)
        with errors_in_one_line(subject.env, "reset or step"):
            try:
                yield subject.env
            except ContractWarning as line:
                raise ContractError(str(line)) from line


def it_can_be_built(subject: EnvSubject) -> None:
    """It can be built with num_envs=2, and its spec is sound."""
    with opened(subject) as env:
        require(env.num_envs == NUM_ENVS, f"num_envs is {env.num_envs}, and 2 were asked for")
        env_contract.require_spec(env)


def observations_fit_the_spec(subject: EnvSubject) -> None:
    """What reset returns has the names, shapes and dtypes of spec.obs, and is finite."""
    with opened(subject) as env:
        env_contract.require_obs(env, env.reset(3), "the reset's obs")


def steps_fit_the_spec(subject: EnvSubject) -> None:
    """Observations, rewards, ends and log of a step have their shapes and dtypes."""
    with opened(subject) as env:
        obs = env.reset(3)
        for action in random_actions(env, 5):
            step = env.step(playable(env, action, obs))
            env_contract.require_step(env, step)
            obs = step.obs


def the_seed_decides(subject: EnvSubject) -> None:
    """The same seed gives the same episodes."""
    with opened(subject) as env:
        env_contract.require_same_with_same_seed(env, 1, SEEDED_STEPS)


def other_seeds_give_other_episodes(subject: EnvSubject) -> None:
    """Another seed gives other episodes."""
    with opened(subject) as env:
        env_contract.require_other_with_other_seed(env, 1, SEEDED_STEPS)


def steps_do_not_change_what_was_returned(subject: EnvSubject) -> None:
    """A step leaves the tensors of the step before as they were."""
    with opened(subject) as env:
        obs, plan = env.reset(4), random_actions(env, 3)
        for action in plan:
            before = tt.each(dict(obs), torch.clone)
            step = env.step(playable(env, action, obs))
            for name, value in before.items():
                if not env_contract.same(value, obs[name]):
                    wrong(env, f'step changes the obs["{name}"] of the step before: return a copy')
            obs = step.obs


def episodes_end_and_begin_again(subject: EnvSubject) -> None:
    """An env whose episode ended is reset inside step; next_obs is the episode's last one."""
    with opened(subject) as env:
        first = env_contract.FirstSteps(env, lambda line: require(False, line))
        obs = env.reset(5)
        since, actions = time.monotonic(), random_actions(env, subject.most_steps, seed=1)
        for action in actions:
            step = env.step(playable(env, action, obs))
            first.saw(obs, step)
            if first.done:
                return
            obs = step.obs
            if time.monotonic() - since > subject.most_seconds:
                break
        if first.steps >= env_contract.QUIET:
            wrong(env, env_contract.endless(first.steps))
        skip("no episode ended; an environment needs a time limit (truncated) at the latest")


def a_reset_of_some_leaves_the_others(subject: EnvSubject) -> None:
    """reset(mask=...) begins new episodes in the envs of the mask only."""
    with opened(subject) as env:
        env_contract.require_masked_reset(env, 7, MASKED_STEPS)


def the_task_decides(subject: EnvSubject) -> None:
    """Other tasks give other episodes (environments with a task vector only)."""
    with opened(subject) as env:
        if env.spec.task is None:
            skip("it has no task vector")
        env_contract.require_tasks(env, 8, env_contract.TASK_STEPS)


def actions_are_bounded(subject: EnvSubject) -> None:
    """An action beyond [-1, 1] does what the bound does, or is refused."""
    with opened(subject) as env:
        if not env.spec.act.is_continuous:
            skip("its actions are discrete")
        env_contract.require_bounded_actions(env, 6)


def a_saved_state_goes_back_exactly(subject: EnvSubject) -> None:
    """get_state and set_state restore the envs exactly, or raise NotSavable."""
    with opened(subject) as env:
        obs = env.reset(5)
        plan = random_actions(env, 6)
        begun = env.step(playable(env, plan[0], obs)).obs
        try:
            state = tt.each(env.get_state(), torch.clone)
        except NotSavable:
            skip("it says that it cannot be saved: a resumed run begins new episodes")
        runs = []
        for _ in range(2):
            env.set_state(state)
            obs = begun
            seen: list[tt.Tensors] = []
            for action in plan[1:]:
                step = env.step(playable(env, action, obs))
                seen.append(tt.each(step.next_obs, torch.clone))
                obs = step.obs
            runs.append(seen)
        for one, other in zip(*runs, strict=True):
            if any(not torch.equal(one[name], other[name]) for name in one):
                wrong(
                    env,
                    "after set_state it goes on otherwise: get_state has to hold everything, "
                    "random generators too (or leave both out: NotSavable)",
                )


def gymnasium_agrees(subject: EnvSubject) -> None:
    """Gymnasium's own checker finds nothing (environments of Gymnasium only)."""
    with opened(subject) as env:
        single = getattr(innermost(env), "envs", None)
        try:
            import gymnasium
            from gymnasium.utils.env_checker import check_env
        except ModuleNotFoundError:
            skip("Gymnasium is not installed")
        if not isinstance(single, list) or not isinstance(single[0], gymnasium.Env):
            skip("it is not one of Gymnasium's")
        if MASK in env.spec.obs:
            skip("its checker would choose what the mask forbids")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # its recommendations
                check_env(single[0].unwrapped, skip_render_check=True)
        except ConfigError:
            raise
        except Exception as error:
            raise ContractError(f"gymnasium's check_env says: {error}") from error


CHECKS = checks_of(__name__)
