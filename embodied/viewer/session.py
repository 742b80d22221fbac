"""One episode after another, of one environment row and whoever acts in it; each kept whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from embodied.core import tensors as tt
from embodied.core.build import nearest
from embodied.core.env import NotSavable, Step, VecEnv
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.viewer.choices import Acts, Remembers
from embodied.viewer.episode import Episode, Mind, Moment
from embodied.viewer.foresight import Foresight
from embodied.viewer.launch import Run, ViewerError
from embodied.viewer.look import Array
from embodied.viewer.witness import Sight, Witness

PLANS = 200
"""Decisions of an episode whose plans are foreseen for a file."""
KEPT = 512 * 2**20
"""Bytes of world states that are kept of an episode; later moments cannot be gone on from."""


class Session:
    """Steps row 0 of `env`; every episode starts from a seed of its own, the one after the last.

    `choices` names who may act; each is made when it is first chosen. `task` [D] in [0, 1] fixes
    the task vector of all episodes (None: drawn anew for each). `now` is the moment that is looked
    at, number `at` of the episode's; `advance` goes through what is kept, and then on. A `rival`
    begins with it, from the same start, and goes along, until both have ended.
    """

    recorded = False

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
        self.env, self.choices, self.explore = env, choices, False
        self.spec, self.witness = env.spec, Witness(env)
        self.made: dict[str, Acts] = {}
        self.task: Tensor | None = None
        self.choose(chosen)
        self.episode, self.at = Episode(0), 0
        self.curves = [name for name, leaf in env.spec.obs.items() if is_curve(leaf)]
        self.first = torch.ones(1, dtype=torch.bool)
        self.rival: Session | None = None
        self._savable, self._room, self._luck = True, KEPT, torch.get_rng_state()

    @property
    def title(self) -> str:
        """What there is to see."""
        config = getattr(self.env, "config", None)
        return self.spec.text or getattr(config, "id", type(self.env).__name__)

    @property
    def now(self) -> Moment:
        moments = self.episode.moments
        return moments[min(self.at, len(moments) - 1)]

    @property
    def both(self) -> list[Session]:
        """Itself, and its rival."""
        return [self] if self.rival is None else [self, self.rival]

    @property
    def length(self) -> int:
        """How many moments are kept, of the longer episode."""
        return max(len(each.episode.moments) for each in self.both)

    @property
    def live(self) -> bool:
        """Whether nothing is kept after the moment that is looked at."""
        return self.at >= self.length - 1

    @property
    def over(self) -> bool:
        """Whether every episode has ended."""
        return all(each.episode.end for each in self.both)

    def face(self, rival: Session) -> None:
        """Play beside `rival`, in a world of the same kind."""
        self.rival = rival

    def choose(self, name: str) -> None:
        """Let `name` act from the next step on, as if its episode began there."""
        if name not in self.choices:
            raise ViewerError(f'there is no policy "{name}"{nearest(name, self.choices)}')
        if name not in self.made:
            self.made[name] = self.choices[name]()
        self.acts, self.chosen = self.made[name], name
        self.first = torch.ones(1, dtype=torch.bool)

    def begin(self, seed: int) -> None:
        """Start the episode that `seed` (and `task`, where it is fixed) gives."""
        for each in self.both:
            each.task = self.task
            each._begin(seed)
        self._look(0)

    def advance(self) -> None:
        """On by one moment: a kept one, else a control step; after the end, the next start."""
        if self.live and self.over:
            return self.begin(self.episode.seed + 1)
        if self.live:
            for each in self.both:
                if not each.episode.end:
                    each._step()
        self._look(self.at + 1)

    def seek(self, at: int) -> None:
        """Look at the kept moment number `at`, counted from the oldest."""
        self._look(at)

    def branch(self) -> None:
        """Forget what came after the moment that is looked at, and go on from there: with another
        policy, or other luck. ViewerError where the world cannot go back."""
        if self.live:
            return
        later = [each for each in self.both if self.at < len(each.episode.moments) - 1]
        if any(each.now.state is None for each in later):
            raise ViewerError("this world cannot go on from an earlier moment; press Restart")
        for each in later:
            each._return()

    def _look(self, at: int) -> None:
        at = min(max(at, 0), self.length - 1)
        for each in self.both:
            each.at = at

    def _begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._luck = torch.get_rng_state()
        task = None if self.task is None else self.task[None]
        obs = row_of(self.env.reset(seed, task))
        self._room = KEPT
        start = Moment(0, self.witness.see(obs), obs, obs, self._state())
        self.first = torch.ones(1, dtype=torch.bool)
        self.episode = Episode(seed, [start], self.chosen, self.witness.shapes())

    def _return(self) -> None:
        """Put the world, and who acts if it is the same, where they were."""
        now, moments = self.now, self.episode.moments[: self.at + 1]
        assert now.state is not None
        obs = self.env.set_state({key: value.clone() for key, value in now.state.items()})
        moments[-1] = replace(now, obs=row_of(obs))
        self.episode.moments = moments
        same = now.mind is not None and now.mind.who == self.chosen
        self.first = torch.full((1,), not same)
        if same and now.mind is not None and isinstance(self.acts, Remembers):
            self.acts.set_state(now.mind.actor)
            self._luck = now.mind.luck

    def _step(self) -> None:
        before = self.episode.moments[-1]
        self.acts.explore = self.explore
        # Noise is this session's own: who else acts beside it changes nothing.
        torch.set_rng_state(self._luck)
        action = self.acts(before.obs, self.first)
        self._luck = torch.get_rng_state()
        step = self.env.step(action)
        self.first = step.ended
        shown = row_of(step.next_obs)
        ended = bool(step.ended[0])
        sight = self.witness.after(shown, ended, before.sight)
        forgotten = self.episode.add(self._moment(before, action, step, shown, sight))
        self.at -= forgotten

    def _moment(
        self, before: Moment, action: Tensor, step: Step, shown: Tensors, sight: Sight
    ) -> Moment:
        """What is kept of one step. At the end of an episode that is what it led to, not the next
        start, where the world is already."""
        ended = bool(step.ended[0])
        end = ("ended" if bool(step.terminated[0]) else "out of time") if ended else ""
        plan: Tensor | None = getattr(self.acts, "plan", None)
        decided: Tensor = getattr(self.acts, "decided", self.first)
        return Moment(
            step=before.step + 1,
            sight=sight,
            shown=shown,
            obs=row_of(step.obs),
            state=None if ended else self._state(),
            action=action[0].float().reshape(-1).tolist(),
            reward=float(step.reward[0]),
            success=bool(step.log["success"][0]) if "success" in step.log else None,
            plan=None if plan is None else plan[0].detach().clone(),
            place=int(getattr(self.acts, "cursor", torch.ones(1))[0]) - 1,
            fresh=bool(decided[0]),
            end=end,
            mind=self._mind(),
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
        task = getattr(self.env, "task", None)
        if self.env.spec.task is None or task is None or len(task) != 1:
            return None if self.task is None else self.task.tolist()
        return [float(value) for value in task[0]]

    def ahead(self) -> list[Array]:
        """Where the plan leads that is followed at the moment that is looked at, and where other
        draws of the noise would have led; paths [H + 1, 3] (m)."""
        moments, at = self.episode.moments, min(self.at, len(self.episode.moments) - 1)
        # The decision that the next action is of, or the last one.
        following = [i for i in range(1, min(at + 2, len(moments))) if moments[i].fresh]
        return self._ahead(following[-1]) if following else []

    def plans(self) -> list[tuple[int, list[Array]]]:
        """`ahead` of every decision, with the number of its moment."""
        fresh = [i for i, moment in enumerate(self.episode.moments) if i and moment.fresh]
        every = [(i - 1, self._ahead(i)) for i in fresh[:PLANS]]
        return [(at, paths) for at, paths in every if paths]

    def trail(self) -> Array | None:
        """Where the tool has been; None where it is not observed."""
        return None if self.foresight is None else self.foresight.trail(self.episode.moments)

    def _ahead(self, number: int) -> list[Array]:
        before, after = self.episode.moments[number - 1 : number + 1]
        if self.foresight is None or after.mind is None:
            return []
        return self.foresight.paths(before, after, self.made[after.mind.who])

    def close(self) -> None:
        """Let go of the world."""
        for each in self.both:
            each.env.close()
            if each.foresight is not None:
                each.foresight.close()


def row_of(obs: Tensors) -> Tensors:
    """Row 0 [1, ...], ours to keep: worlds may write where they wrote before."""
    return tt.each(obs, lambda value: value[:1].clone())


def is_curve(leaf: Leaf) -> bool:
    """Whether a leaf is numbers over time, neither a picture nor points."""
    return len(leaf.shape) < 2 and leaf.size > 0
