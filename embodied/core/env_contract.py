"""The contract of environments as checks: what `embodied check env` runs, and a run at its start.

`require_*` raise ContractError (or NotFinite) in one line. `require_start` and `FirstSteps` are for
a training run: they check an environment of the user's own before the first update, and until its
first episodes have ended; after that nothing is checked in the loop.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.choices import Choices
from embodied.core.device import rng_state, set_rng_state
from embodied.core.env import HasLevels, HasUnsharedState, NotFinite, Step, VecEnv, require_finite
from embodied.core.errors import ContractError, ContractWarning, NotApplicable, RobotError
from embodied.core.spec import hidden, mixed_leaf
from embodied.core.tensors import Tensors, each
from embodied.core.wrapper import Wrapper, find_protocol

ONE_LINE = (ContractError, ConfigError, NotFinite, RobotError, ModuleNotFoundError)
BEYOND = 3.0  # an action outside [-1, 1]
PROBED = 2  # steps of the check at the start of a run
JUMP = 3.0  # times the largest change of an ordinary step: a change that is a reset
TASK_STEPS = 20  # steps in which two tasks should differ
MOST_SECONDS = 1.0  # time before a run that is spent on waiting for the end of an episode, s
QUIET = 2_000  # steps of all parallel envs in which an episode should have ended
MANY = 4096  # numbers of an observation that is rather a picture


def innermost(env: VecEnv) -> VecEnv:
    return innermost(env.env) if isinstance(env, Wrapper) else env


def called(env: VecEnv) -> str:
    """The id of the environment that `env` adapts, or the name of its class."""
    inner = innermost(env)
    name = getattr(getattr(inner, "config", None), "id", None)
    return name if isinstance(name, str) else type(inner).__name__


def is_users(env: VecEnv) -> bool:
    """Whether the code of `env` is not of this project (also: a Gymnasium id that it adapts).
    Environments that a package has `tested` are not either: EnvPool takes 15 pools to check, 10 s
    for eight walkers."""
    inner = innermost(env)
    if getattr(inner, "tested", False):
        return False
    return not type(inner).__module__.startswith("embodied.") or inner.spec.native is not None


def random_actions(env: VecEnv, steps: int, seed: int = 0) -> list[Tensor]:
    """`steps` actions [B, A] in [-1, 1], or int64 [B]; `playable` ones where there is a mask."""
    random, act = torch.Generator().manual_seed(seed), env.spec.act
    shape = (steps, env.num_envs, *act.shape)
    if act.dtype == "int64":
        assert isinstance(act.high, int | float)
        return list(torch.randint(int(act.high) + 1, shape, generator=random).to(env.device))
    uniform = torch.rand(shape, generator=random)
    if not act.is_continuous:
        return list(Choices(replace(env.spec, obs={})).random(uniform, {}).to(env.device))
    return list((uniform * 2 - 1).to(env.device))


def playable(env: VecEnv, action: Tensor, obs: Tensors) -> Tensor:
    """`action` [B, A], its choices replaced by ones that the mask in `obs` allows."""
    choices = Choices(env.spec).to(env.device)
    if not choices.masked:
        return action
    chosen, numbers = choices.split(action[:, None])
    uniform = choices.join((chosen + 0.5) / choices.count, numbers / 2 + 0.5)
    return choices.random(uniform, obs)[:, 0]


def wrong(env: VecEnv, line: str) -> NoReturn:
    raise ContractError(f"{called(env)}: {line}")


def require_spec(env: VecEnv) -> None:
    """The action is in [-1, 1] or of choices; `dt` is positive; JSON keeps the spec."""
    spec, act = env.spec, env.spec.act
    if act.dtype == "int64":
        if act.shape != () or act.low not in (None, 0) or not isinstance(act.high, int | float):
            wrong(env, 'discrete actions are Leaf((), "int64", 0, HIGH), HIGH included')
    elif act.classes:
        if replace(mixed_leaf(act.classes, act.names), unit=act.unit) != act:
            wrong(env, "an action of choices and numbers is mixed_leaf(classes) of core.spec")
    elif act.dtype != "float32" or len(act.shape) != 1 or not act.is_unit:
        wrong(
            env,
            f"its action is {act.dtype}{list(act.shape)} in [{act.low}, {act.high}]; declare "
            "Leaf((A,), low=-1.0, high=1.0) and scale it to your own units in step",
        )
    if not spec.dt > 0:
        wrong(env, f"spec.dt={spec.dt} should be the seconds of a control step")
    if spec != type(spec).from_json(spec.to_json()):
        wrong(env, "spec does not survive JSON: use plain numbers, strings and tuples in it")


def require_obs(env: VecEnv, obs: Mapping[str, Tensor], where: str) -> None:
    """Names, shapes and dtypes of observations [B, ...] are those of the spec; all are finite."""
    if not isinstance(obs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        wrong(env, f"{where} is a {type(obs).__name__}, should be a dict of tensors by name")
    if missing := sorted(set(env.spec.obs) - set(obs)):
        wrong(env, f'{where} has no "{missing[0]}", which spec.obs declares')
    if extra := sorted(set(obs) - set(env.spec.obs)):
        wrong(env, f'{where} has "{extra[0]}", which is not in spec.obs: add a Leaf for it')
    for name, leaf in env.spec.obs.items():
        require_tensor(env, f'{where}["{name}"]', obs[name], leaf.dtype, leaf.shape)
    require_finite(torch.zeros(1), dict(obs), f"{called(env)}: {where}")


def require_tensor(
    env: VecEnv, name: str, value: object, dtype: str, shape: tuple[int, ...] = ()
) -> None:
    """`value` is a tensor [B, *shape] of `dtype`."""
    full = (env.num_envs, *shape)
    if not isinstance(value, Tensor):
        wrong(env, f"{name} is a {type(value).__name__}, should be a tensor: torch.as_tensor(...)")
    if tuple(value.shape) != full:
        squeezed = tuple(value.shape) == (*full, 1)
        what = name.removeprefix("the reset's ")
        mend = f"write {what}.squeeze(-1)" if squeezed else "one for each parallel env"
        wrong(env, f"{name} is of shape {list(value.shape)}, should be {list(full)}: {mend}")
    if value.dtype != getattr(torch, dtype):
        kind = str(value.dtype).removeprefix("torch.")
        what = name.removeprefix("the reset's ")
        wrong(env, f"{name} is {kind}, should be {dtype}: write {what}.to(torch.{dtype})")


def require_step(env: VecEnv, step: Step) -> None:
    """Shapes, dtypes and finite values of everything that `env.step` returned."""
    require_tensor(env, "reward", step.reward, "float32")
    require_tensor(env, "terminated", step.terminated, "bool")
    require_tensor(env, "truncated", step.truncated, "bool")
    require_obs(env, step.obs, "obs")
    require_obs(env, step.next_obs, "next_obs")
    require_finite(step.reward, {}, called(env))
    if (step.terminated & step.truncated).any():
        wrong(env, "an episode is terminated and truncated at once: truncated & ~terminated")
    for name, value in step.log.items():
        if getattr(value, "shape", ())[:1] != (env.num_envs,):
            wrong(env, f'log["{name}"] should be a tensor with one row for each parallel env')


class FirstSteps:
    """Checks steps from a reset until an episode has ended and its env has made one more step.

    `saw(before, step)` takes the observations before a step, and that step; `steps` counts them.
    `done` is true when there is nothing left to check. `note` gets a line where an end looks wrong,
    but could be meant, and where no episode has ended in `QUIET` steps.
    """

    def __init__(self, env: VecEnv, note: Callable[[str], None] | None = None) -> None:
        self.env, self.note, self.done = env, note or warn, False
        self.steps = 0
        self._largest = 0.0  # of the changes within episodes
        self._kept: Tensor | None = None  # envs whose obs is next_obs though their episode ended

    def saw(self, before: Tensors, step: Step) -> None:
        """Raise ContractError if the contract is broken in this step."""
        require_step(self.env, step)
        self.steps += 1
        if self._kept is not None:
            self._require_begun(self._kept, step)
            self.done = True
            return
        change = _change(before, step.next_obs)
        self._largest = max(self._largest, float((change * ~step.ended).max()))
        if not step.ended.any():
            if self.steps == QUIET:
                self.note(f"{called(self.env)}: {endless(QUIET)}")
        elif innermost(self.env).spec.native is not None:  # its adapter resets it
            self.done = True
        else:
            same = _change(step.obs, step.next_obs) == 0
            self._kept = step.ended & same & (change > 0)
            jumped = change[self._kept]  # what jumped was reset before it was kept
            if len(jumped) and self._largest > 0 and bool((jumped > JUMP * self._largest).all()):
                wrong(
                    self.env,
                    "next_obs is the next episode's first observation where one ended: it should "
                    "be the last one of the episode that ended (keep it before you reset)",
                )

    def _require_begun(self, kept: Tensor, step: Step) -> None:
        """The step after an end: its env is in a new episode."""
        if self.steps > 2 and bool((kept & step.ended).any()):
            wrong(
                self.env,
                "an env whose episode ended is not reset: reset it inside step, so that obs is the "
                "first observation of its next episode",
            )
        if kept.any():
            self.note(
                f"{called(self.env)}: obs and next_obs are the same where an "
                "episode ended: next_obs is its last observation, obs the first one of the next "
                "episode (reset the env inside step)"
            )


def endless(steps: int) -> str:
    return (
        f"no episode has ended in {steps:,} steps: give a time limit, env.horizon=N (in Python: "
        "gymnasium.wrappers.TimeLimit(env, N))"
    )


def _change(one: Tensors, other: Tensors) -> Tensor:
    parts = [(other[k].float() - one[k].float()).abs().reshape(len(one[k]), -1) for k in one]
    return torch.cat(parts, 1).amax(1)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether all values are equal; one that is not a number is equal to itself."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def require_same_with_same_seed(env: VecEnv, seed: int, steps: int) -> None:
    plan = random_actions(env, steps)
    one, other = (_episode(env, seed, plan) for _ in range(2))
    for at, (here, there) in enumerate(zip(one, other, strict=True)):
        if not _alike([here], [there]):
            when = "the reset" if at == 0 else f"step {at}"
            wrong(
                env,
                f"seed {seed} gives other observations the second time (from {when}): draw all "
                "random numbers from generators that reset(seed) seeds",
            )


def require_other_with_other_seed(env: VecEnv, seed: int, steps: int) -> None:
    plan = random_actions(env, steps)
    one, other = (_episode(env, start, plan) for start in (seed, seed + 1))
    if all(torch.equal(a[k], b[k]) for a, b in zip(one, other, strict=True) for k in a):
        wrong(
            env,
            "every seed gives the same episodes, so all evaluation episodes are one; draw the "
            "initial state from a generator that reset(seed) seeds",
        )


def _episode(
    env: VecEnv, seed: int, plan: list[Tensor], task: Tensor | None = None
) -> list[Tensors]:
    """Copies of the observations of a reset; then of each step's, its rewards and its ends."""
    obs = each(dict(env.reset(seed, task)), torch.clone)
    return [obs, *_played(env, plan, obs)]


def _played(env: VecEnv, plan: list[Tensor], obs: Tensors) -> list[Tensors]:
    seen: list[Tensors] = []
    for action in plan:
        step = env.step(playable(env, action, obs))
        ends = {"the reward": step.reward, "the end": step.ended}
        seen.append(each({**step.next_obs, **ends}, torch.clone))
        obs = step.obs
    return seen


def _alike(one: list[Tensors], other: list[Tensors], rows: slice = slice(None)) -> bool:
    """Whether two episodes are the same, in the parallel envs `rows`."""
    return all(
        same(here[key][rows], there[key][rows])
        for here, there in zip(one, other, strict=True)
        for key in here
    )


def require_masked_reset(env: VecEnv, seed: int, steps: int) -> None:
    """`reset(mask=...)` begins new episodes in the envs of the mask, and leaves the others, which
    go on for `steps` steps as if nothing had been. An environment may refuse to seed only some."""
    plan, others = random_actions(env, PROBED + steps, seed=2), slice(1, None)
    mask = torch.arange(env.num_envs, device=env.device) == 0
    whole = _episode(env, seed, plan)
    repeats = _alike(whole, _episode(env, seed, plan))
    begun = each(dict(env.reset(seed)), torch.clone)
    before = begun
    for action in plan[:PROBED]:
        before = each(dict(env.step(playable(env, action, before)).obs), torch.clone)
    try:
        after = each(dict(env.reset(seed, mask=mask)), torch.clone)
    except (ConfigError, ValueError):  # EnvPool seeds all together only
        after, repeats = each(dict(env.reset(mask=mask)), torch.clone), False
    later = _played(env, plan[PROBED:], after)
    kept = _alike([before], [after], others)
    if not kept or (repeats and not _alike(whole[1 + PROBED :], later, others)):
        wrong(
            env,
            "reset(mask=...) changes envs that are not in the mask, so that their episodes never "
            "end or end at once: begin new episodes only where mask is true",
        )
    if repeats and not _alike([begun], [after], slice(0, 1)):
        wrong(
            env,
            "reset(seed, mask=...) does not begin the episodes of reset(seed) in the envs of the "
            "mask: seed each of them from (seed, its index)",
        )


def require_tasks(env: VecEnv, seed: int, steps: int) -> None:
    """`reset(task=...)` decides the episode, if the environment has tasks."""
    if env.spec.task is None:
        return
    levels = find_protocol(env, HasLevels)
    drawn = np.random.default_rng(seed)
    shape = (env.num_envs, env.spec.task.size)

    def episode() -> list[Tensors]:
        task = drawn.random(shape) if levels is None else levels.levels.random(shape[0], drawn)
        return _episode(env, seed, plan, torch.as_tensor(task).float().to(env.device))

    plan = random_actions(env, steps)
    if _alike(episode(), episode()):
        wrong(
            env,
            f"two tasks give the same episodes ({steps} steps of random actions): reset ignores "
            "task [B, D], although spec.task declares one",
        )


def require_ends(env: VecEnv, seed: int, steps: int, seconds: float) -> None:
    """An episode ends in `steps` steps of random actions; at most `seconds` are spent on it."""
    obs = env.reset(seed)
    since = time.monotonic()
    for at in range(steps):
        (action,) = random_actions(env, 1, seed=at)
        step = env.step(playable(env, action, obs))
        obs = step.obs
        if step.ended.any() or time.monotonic() - since > seconds:
            return
    wrong(env, endless(steps))


def require_bounded_actions(env: VecEnv, seed: int) -> None:
    """An action beyond [-1, 1] is refused, or does what the bound does. Of an environment that is
    random in spite of its seed nothing can be said."""
    if not env.spec.act.is_continuous:
        return
    ones = torch.ones(env.num_envs, *env.spec.act.shape, device=env.device)
    for sign in (1.0, -1.0):
        at_bound = _episode(env, seed, [sign * ones])
        if not _close(at_bound, _episode(env, seed, [sign * ones])):
            return
        try:
            beyond = _episode(env, seed, [sign * BEYOND * ones])
        except (ConfigError, ValueError):
            continue
        if not _close(at_bound, beyond):
            wrong(
                env,
                f"an action of {sign * BEYOND:g} does more than {sign:g}, the bound: write "
                "action = action.clamp(-1, 1) at the start of step",
            )


def _close(one: list[Tensors], other: list[Tensors]) -> bool:
    return all(
        torch.allclose(here[key].double(), there[key].double(), atol=1e-5, equal_nan=True)
        for here, there in zip(one, other, strict=True)
        for key in here
    )


@contextmanager
def errors_in_one_line(env: VecEnv, doing: str) -> Generator[None]:
    """An exception from the code of `env` becomes a ContractError that says where."""
    try:
        yield
    except (*ONE_LINE, NotApplicable):
        raise
    except Exception as error:
        name, kind = called(env), type(error).__name__
        text = " ".join(str(error).split())
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}:{last.lineno}"
        raise ContractError(f"{name}: {doing} raised {kind}: {text} ({place})") from error


def warn(line: str) -> None:
    warnings.warn(line, ContractWarning, stacklevel=2)


def require_start(
    env: VecEnv, seed: int, note: Callable[[str], None] = warn, teaches: bool = False
) -> None:
    """Check an environment of the user's own before a run: a few steps from two seeds.

    Nothing happens for environments of this project (their contract tests run them), and for a
    single env, which may be a machine: it is neither reset nor moved for a check. `note` gets what
    a run can live with: seeds that decide nothing, actions that are not bounded, masks that are
    ignored where no teacher chooses tasks (`teaches`). The env has to be reset afterwards.
    """
    unshared = find_protocol(env, HasUnsharedState)
    if unshared is not None and (line := unshared.unshared_state()):
        note(f"{called(env)}: {line}")
    if not is_users(env):
        return
    _note_pictures(env, note)
    if env.num_envs < 2:
        return
    require_spec(env)
    before = rng_state()
    with errors_in_one_line(env, "a step"):
        obs = env.reset(seed)
        require_obs(env, obs, "the reset's obs")
        for action in random_actions(env, PROBED):
            step = env.step(playable(env, action, obs))
            require_step(env, step)
            obs = step.obs
        for check in (require_same_with_same_seed, require_other_with_other_seed):
            _noted(note, check, env, seed, PROBED)
        _noted(note, require_bounded_actions, env, seed)
        if teaches:
            require_masked_reset(env, seed, PROBED)
        else:
            _noted(note, require_masked_reset, env, seed, PROBED)
        _noted(note, require_tasks, env, seed, TASK_STEPS)
        _noted(note, require_ends, env, seed, QUIET, MOST_SECONDS)
    set_rng_state(before)


def _note_pictures(env: VecEnv, note: Callable[[str], None]) -> None:
    """`note` the observations of so many numbers that they are rather pictures."""
    inner = innermost(env)
    kinds = getattr(getattr(inner, "config", None), "obs_kind", None)
    if kinds is None and inner.spec.native is not None:
        return  # an adapter that knows its pictures
    for name, leaf in env.spec.obs.items():
        told = leaf.is_picture or leaf.is_points or leaf.is_symbol or leaf.is_text or hidden(name)
        if leaf.size <= MANY or told or name in (kinds or ()):
            continue
        how = 'Leaf((H, W, C), "uint8")' if kinds is None else f"env.obs_kind={{{name}: picture}}"
        note(
            f"{called(env)}: the observation {name} {list(leaf.shape)} is {leaf.size:,} numbers, "
            f"and no picture: if it is one, {how}"
        )


def _noted(note: Callable[[str], None], check: Callable[..., None], *args: object) -> None:
    try:
        check(*args)
    except ContractError as error:
        note(str(error))
