"""Player: one environment row and whoever acts in it, its episode kept step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import nearest
from embodied.core.env import HasCurrentTask, NotSavable, Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.core.wrapper import find_protocol
from embodied.viewer.run_folder import Run, ViewerError
from embodied.viewer.scene.types import Array
from embodied.viewer.session.disturbances import Pushes, Senses, said_of
from embodied.viewer.session.episode import MOVED, SAFETY, Episode, Mind, Moment
from embodied.viewer.session.noise import noise_of
from embodied.viewer.session.plan_preview import Foresight
from embodied.viewer.session.policies import Acts, Remembers
from embodied.viewer.session.snapshot import Sight, Witness

if TYPE_CHECKING:
    from embodied.viewer.session.overlays import Judge

PLANS = 200
"""Decisions of an episode whose plans are foreseen for a file."""
KEPT = 512 * 2**20
"""Bytes of world states that are kept of an episode; later moments cannot be gone on from."""


class Player:
    """Row 0 of `env`, and who acts in it; every episode is kept from its start on.

    `choices` names who may act; each is made when it is first chosen. `task` [D] in [0, 1] fixes
    the task vector of all episodes (None: drawn anew for each). `judge` adds numbers to each step;
    it takes its time to be made, which may be after the first picture (`meet_judge`). `foresight`
    tells where plans lead. `at` is the moment that is looked at.
    """

    counts = "seed"
    """What the number of an episode is."""

    def __init__(
        self,
        env: VecEnv,
        choices: Mapping[str, Callable[[], Acts]],
        chosen: str,
        name: str = "",
        foresight: Foresight | None = None,
    ) -> None:
        self.name, self.foresight = name, foresight
        self.run: Run | None = None
        self.judge: Judge | None = None
        self.judge_later: Callable[[], Judge | None] | None = None
        self.env, self.choices, self.explore = env, choices, False
        self.spec, self.witness = env.spec, Witness(env)
        self.senses, self.pushes, self.pushed = Senses(), Pushes(env), dict[int, str]()
        self.held: tuple[str, Array] | None = None
        """A body that is pulled, and where to [3] (m)."""
        self.pulled = dict[int, str]()
        self.made: dict[str, Acts] = {}
        self.task: Tensor | None = None
        self.choose(chosen)
        self.episode, self.at = Episode(0), 0
        self.curves = [name for name, leaf in env.spec.obs.items() if is_curve(leaf)]
        self.first = torch.ones(1, dtype=torch.bool)
        self._savable, self._room, self._luck = True, KEPT, torch.get_rng_state()

    @property
    def title(self) -> str:
        """What there is to see."""
        config = getattr(self.env, "config", None)
        return self.spec.text or getattr(config, "id", type(self.env).__name__)

    @property
    def trouble(self) -> str:
        """What cannot be told of the steps, and why."""
        return "" if self.judge is None else self.judge.trouble

    @property
    def trial(self) -> str:
        """What is done to the robot, in words."""
        return said_of(self.senses, self.pushed, self.pulled)

    def choose(self, name: str) -> None:
        """Let `name` act from the next step on, as if its episode began there."""
        if name not in self.choices:
            raise ViewerError(f'there is no policy "{name}"{nearest(name, self.choices)}')
        if name not in self.made:
            self.made[name] = self.choices[name]()
        self.acts, self.chosen = self.made[name], name
        self.first = torch.ones(1, dtype=torch.bool)

    def start(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._luck = torch.get_rng_state()
        task = None if self.task is None else self.task[None]
        obs = row_of(self.env.reset(seed, task))
        self._room = KEPT
        self.pushed, self.pulled, self.held = {}, {}, None
        photo = None
        if self.judge is not None:
            self.judge.begin()
            photo = self.judge.photo()
        start = Moment(0, self.witness.see(obs), obs, obs, self._state(), photo=photo)
        self.first = torch.ones(1, dtype=torch.bool)
        self.episode = Episode(seed, [start], self.chosen, self.witness.shapes())

    def meet_judge(self) -> None:
        """Make the judge, if that is still to be done; a start without steps is looked at again."""
        make, self.judge_later = self.judge_later, None
        if make is None:
            return
        self.judge = make()
        if self.judge is not None and len(self.episode.moments) == 1:
            start = self.episode.moments[0]
            self.episode.moments[0] = replace(start, photo=self.judge.photo())

    def go_back(self, at: int) -> None:
        """Put the world, and who acts if it is the same, where they were."""
        moments = self.episode.moments[: at + 1]
        now = moments[-1]
        assert now.state is not None
        obs = self.env.set_state({key: value.clone() for key, value in now.state.items()})
        moments[-1] = replace(now, obs=row_of(obs))
        self.episode.moments = moments
        last = moments[-1].step
        self.pushed = {step: name for step, name in self.pushed.items() if step < last}
        self.pulled = {step: name for step, name in self.pulled.items() if step < last}
        same = now.mind is not None and now.mind.who == self.chosen
        self.first = torch.full((1,), not same)
        if same and now.mind is not None and isinstance(self.acts, Remembers):
            self.acts.set_state(now.mind.actor)
            self._luck = now.mind.luck

    def step(self) -> None:
        before = self.episode.moments[-1]
        self.acts.explore = self.explore
        # Noise is this session's own: who else acts beside it changes nothing.
        torch.set_rng_state(self._luck)
        seen = before.obs if self.senses.whole else self.senses.of(self.episode.moments)
        action = self.acts(seen, self.first)
        self._luck = torch.get_rng_state()
        if self.held is not None:
            self.pushes.pull(*self.held, self.spec.dt)
            self.pulled[before.step] = self.held[0]
        step = self.env.step(action)
        self.first = step.ended
        shown = row_of(step.next_obs)
        ended = bool(step.ended[0])
        sight = self.witness.after(shown, ended, before.sight)
        moment = self._moment(before, action, step, shown, sight)
        if self.judge is not None:
            moment = replace(moment, photo=self.judge.photo())
            known = self.judge.numbers(before, moment, self.acts)
            moment = replace(moment, numbers={**moment.numbers, **known})
        forgotten = self.episode.add(moment)
        self.at -= forgotten

    def push(self, name: str, strength: float, way: Array | None = None) -> None:
        """Push something at the newest moment; with a `way` [3], `name` is a link of the robot, and
        is pushed along it. ViewerError where it cannot be."""
        pushes = self.pushes
        if name not in (pushes.names if way is None else pushes.links()):
            known = ", ".join(pushes.names)
            raise ViewerError(f"{name} cannot be pushed here (can: {known or 'nothing'})")
        now = self.episode.moments[-1]
        if now.end:
            raise ViewerError("the episode has ended; press Restart, and push then")
        if way is None:
            pushes.push(name, strength, now.step)
        else:
            pushes.shove(name, way, strength)
        self.pushed[now.step] = name
        self.episode.moments[-1] = replace(now, state=self._state())

    def _moment(
        self, before: Moment, action: Tensor, step: Step, shown: Tensors, sight: Sight
    ) -> Moment:
        """What is kept of one step. At the end of an episode that is what it led to, not the next
        start, where the world is already."""
        ended = bool(step.ended[0])
        end = ("ended" if bool(step.terminated[0]) else "out of time") if ended else ""
        plan: Tensor | None = getattr(self.acts, "plan", None)
        decided: Tensor = getattr(self.acts, "decided", self.first)
        fresh = bool(decided[0])
        return Moment(
            step=before.step + 1,
            sight=sight,
            shown=shown,
            obs=row_of(step.obs) if ended else shown,
            state=None if ended else self._state(),
            action=action[0].float().reshape(-1).tolist(),
            reward=float(step.reward[0]),
            success=bool(step.log["success"][0]) if "success" in step.log else None,
            plan=None if plan is None else plan[0].detach().clone(),
            place=int(getattr(self.acts, "cursor", torch.ones(1))[0]) - 1,
            fresh=fresh,
            end=end,
            mind=self._mind(),
            numbers={
                name: float(value[0])
                for name, value in step.log.items()
                if name.startswith((SAFETY, MOVED))
            },
            noise=noise_of(self.acts) if fresh else before.noise,
        )

    def _mind(self) -> Mind | None:
        if not isinstance(self.acts, Remembers):
            return None
        return Mind(self.chosen, self.acts.get_state(), self._luck)

    def _state(self) -> Tensors | None:
        if not self._savable or self._room <= 0:
            return None
        try:
            state = {key: value.clone() for key, value in self.env.get_state().items()}
        except NotSavable:
            self._savable = False
            return None
        self._room -= sum(value.numel() * value.element_size() for value in state.values())
        return state

    @property
    def drawn_task(self) -> list[float] | None:
        """The running episode's task vector, where the environment shows it."""
        source = find_protocol(self.env, HasCurrentTask)
        task = None if source is None else source.task
        if self.env.spec.task is None or task is None or len(task) != 1:
            return None if self.task is None else self.task.tolist()
        return [float(value) for value in task[0]]

    def plans(self) -> list[tuple[int, list[Array]]]:
        """`ahead` of every decision, with the number of its moment."""
        fresh = [i for i, moment in enumerate(self.episode.moments) if i and moment.fresh]
        every = [(i - 1, self.ahead_of(i)) for i in fresh[:PLANS]]
        return [(at, paths) for at, paths in every if paths]

    def trail(self) -> Array | None:
        """Where the tool has been; None where it is not observed."""
        return None if self.foresight is None else self.foresight.trail(self.episode.moments)

    def ahead_of(self, number: int) -> list[Array]:
        before, after = self.episode.moments[number - 1 : number + 1]
        if self.foresight is None or after.mind is None:
            return []
        return self.foresight.paths(before, after, self.made[after.mind.who])


def row_of(obs: Tensors) -> Tensors:
    """Row 0 [1, ...], ours to keep: worlds may write where they wrote before."""
    return tt.each(obs, lambda value: value[:1].clone())


def is_curve(leaf: Leaf) -> bool:
    """Whether a leaf is numbers over time, neither a picture nor points."""
    return len(leaf.shape) < 2 and leaf.size > 0
