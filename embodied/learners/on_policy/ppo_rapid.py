"""RAPID: PPO that also imitates its own best episodes, for sparse-reward procedural environments.

Zha, Ma, Yuan, Hu and Liu, "Rank the episodes", 2021; the exploration baseline of Andres et al.,
2023. An episode of T decisions with D distinct observations is ranked by return and exploration
score; N(s) is the number of occurrences of an observation in all of training:

    S = w_0 R + w_1 D / T + w_2 1/T sum_t N(s_t)^(-1/2),    L = - mean log pi(a | o)

R is the undiscounted return. The buffer keeps at most `size` decisions of the best episodes, which
are ranked again with every batch as counts grow. After each PPO update, `bc_steps` steps on L.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.bounds import Count, NonNegative
from embodied.core.policy import Policy
from embodied.core.spec import Spec, hidden
from embodied.core.tensors import Tensors, nest, take, under
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy import ppo_cloning

DIGEST = 16  # bytes of an observation's hash


@dataclass(frozen=True)
class Config(ppo_cloning.Config):
    """Settings of RAPID. Counts (w_2) are useless, and grow with the run, if observations never
    repeat. The paper uses 5 BC steps per episode."""

    size: Count = 10_000  # decisions in the buffer of the best episodes
    weights: tuple[NonNegative, NonNegative, NonNegative] = (1.0, 0.1, 0.001)  # w_0, w_1, w_2


class PpoRapid(ppo_cloning.CloningPpo):
    """RAPID. Checkpoints hold the buffer, the counts and running episodes, for an exact resume."""

    optimizer_name = "imitator"

    def __init__(self, config: Config, policy: Policy, spec: Spec, run: RunPlan) -> None:
        super().__init__(config, policy, spec, run)
        self.best = EpisodeBuffer(config.size, config.weights)
        self.open: list[Episode] = []  # the running episode of each parallel env

    def update(self, batch: Tensors) -> dict[str, Tensor]:
        metrics = super().update(batch)
        self.best.take(self._ended(batch))
        device = batch["reward"].device
        told = {name: torch.tensor(value) for name, value in self.best.metrics().items()}
        metrics |= tt.to(told, device)
        steps = self.clone_steps()
        if steps and distributed.all_min(len(self.best)):
            metrics["own_loss"] = self._clone(steps)
        return metrics

    def _ended(self, batch: Tensors) -> list[Episode]:
        """The episodes that ended in a batch [T, B], in the order of the parallel envs."""
        obs = {k: v for k, v in under(batch, "obs").items() if not hidden(k)}
        rows = tt.each({**nest(obs, "obs"), "action": batch["action"]}, Tensor.cpu)
        if self.played is not None and rows["action"].ndim > 2:
            rows["action"] = rows["action"][..., : self.played]
        valid = batch["valid"] & batch["learn"] if "learn" in batch else batch["valid"]
        valid = valid.cpu()
        reward = batch["reward"].cpu()
        over = batch["ended"].cpu()
        first = batch["first"].cpu()
        count = valid.shape[1]
        self.open = self.open if len(self.open) == count else [Episode() for _ in range(count)]
        ended: list[Episode] = []
        for row in range(count):
            at = valid[:, row].nonzero().flatten()
            mine = tt.each(rows, lambda leaf, at=at, row=row: leaf[at, row])
            marks = (first[at, row].tolist(), over[at, row].tolist())
            ended += self._cut(row, mine, reward[at, row], *marks)
        return ended

    def _cut(
        self, row: int, mine: Tensors, reward: Tensor, first: list[bool], over: list[bool]
    ) -> list[Episode]:
        """Append the decisions [n, ...] of parallel env `row` to its episodes; returns the finished
        ones."""
        ended: list[Episode] = []
        begun = 0
        for at, (new, end) in enumerate(zip(first, over, strict=True)):
            if new:  # the running episode was aborted
                self.open[row] = Episode()
                begun = at
            if end or at == len(first) - 1:
                piece = slice(begun, at + 1)
                part = tt.each(mine, lambda leaf, piece=piece: leaf[piece])
                self.open[row] = self.open[row].longer(part, float(reward[piece].sum()))
                begun = at + 1
            if end:
                ended.append(self.open[row])
                self.open[row] = Episode()
        return ended

    def _clone_loss(self) -> Tensor:
        index = torch.randint(len(self.best), (self.config.bc_batch_size,))
        rows = tt.to(take(self.best.table, index), self.lr.base_lrs.device)
        return -self._evaluate_actions(rows)[0].mean()

    def get_state(self) -> dict[str, Any]:
        running = [dict(vars(episode)) for episode in self.open]
        return super().get_state() | {"best": self.best.get_state(), "open": running}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        kept = tt.state_to({"best": state["best"], "open": state["open"]}, "cpu")
        self.best.set_state(kept["best"])
        self.open = [Episode(**episode) for episode in kept["open"]]


@dataclass
class Episode:
    """The decisions `rows` [T, ...] of an episode and its return `ret`. For finished episodes also
    the index of each decision's observation in the buffer's counts (`seen` [T]) and the share of
    distinct observations (`local`)."""

    rows: Tensors = field(default_factory=dict[str, Tensor])
    ret: float = 0.0
    local: float = 0.0
    seen: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __len__(self) -> int:
        return tt.length(self.rows) if self.rows else 0

    def longer(self, rows: Tensors, ret: float) -> Episode:
        """This episode extended by the decisions `rows` [n, ...] with the reward sum `ret`."""
        return Episode(tt.cat([self.rows, rows] if self.rows else [rows]), self.ret + ret)


class EpisodeBuffer:
    """Buffer of the best episodes' decisions: `table` [n, ...], best first, n at most `size`. The
    last episode may be truncated to fit; it keeps the score of the whole episode."""

    def __init__(self, size: int, weights: tuple[float, float, float]) -> None:
        self.size = size
        self.weights = weights
        self.episodes: list[Episode] = []
        self.scores: list[float] = []
        self.table: Tensors = {}
        self.number: dict[bytes, int] = {}  # index of each observation's hash
        self.counts = np.zeros(1024, np.int64)

    def __len__(self) -> int:
        return tt.length(self.table) if self.table else 0

    def take(self, ended: list[Episode]) -> None:
        """Add finished episodes, in this order; drops those that are no longer among the best."""
        if not ended:
            return
        for episode in ended:
            self._note(episode)
        known = [*self.episodes, *ended]
        scores = self.rated(known)
        order = sorted(range(len(known)), key=lambda at: (-scores[at], -at))  # ties: newer first
        self.episodes = []
        self.scores = []
        room = self.size
        for at in order:
            if room <= 0:
                break
            self.episodes.append(known[at])
            self.scores.append(float(scores[at]))
            room -= len(known[at])
        self._lay_out()

    def rated(self, episodes: list[Episode]) -> NDArray[np.float64]:
        """The score S of each episode with the current counts."""
        far, near, rare = self.weights
        scores = np.array([far * each.ret + near * each.local for each in episodes])
        if rare:
            bonus = self.counts.clip(1) ** -0.5
            scores += rare * np.array([bonus[each.seen.numpy()].mean() for each in episodes])
        return scores

    def _lay_out(self) -> None:
        whole = tt.cat([episode.rows for episode in self.episodes])
        self.table = tt.each(whole, lambda leaf: leaf[: self.size])

    def _note(self, episode: Episode) -> None:
        """Count the episode's observations."""
        names = digests(under(episode.rows, "obs"))
        episode.local = len(set(names)) / len(names)
        if not self.weights[2]:
            return
        seen = np.array([self.number.setdefault(name, len(self.number)) for name in names])
        while len(self.number) > len(self.counts):
            self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
        np.add.at(self.counts, seen, 1)
        episode.seen = torch.from_numpy(seen)

    def metrics(self) -> dict[str, float]:
        returns = [episode.ret for episode in self.episodes]
        if not returns:
            return {}
        least = {"kept_least": self.scores[-1], "kept_return": sum(returns) / len(returns)}
        return {"kept": float(len(self)), **least}

    def get_state(self) -> dict[str, Any]:
        names = np.frombuffer(b"".join(self.number), np.uint8).reshape(-1, DIGEST)
        return {
            "episodes": [dict(vars(episode)) for episode in self.episodes],
            "scores": list(self.scores),
            "names": torch.from_numpy(names.copy()),
            "counts": torch.from_numpy(self.counts[: len(names)].copy()),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned."""
        self.episodes = [Episode(**episode) for episode in state["episodes"]]
        self.scores = list(state["scores"])
        names = state["names"].cpu().numpy()
        self.number = {name.tobytes(): at for at, name in enumerate(names)}
        self.counts = np.zeros(max(len(names), 1024), np.int64)
        self.counts[: len(names)] = state["counts"].cpu().numpy()
        self.table = {}
        if self.episodes:
            self._lay_out()


def digests(obs: Tensors) -> list[bytes]:
    """A hash of each observation [n, ...]; equal observations have equal hashes."""
    flat = [
        leaf.reshape(len(leaf), -1).cpu().contiguous().numpy() for _, leaf in sorted(obs.items())
    ]
    seen = (b"".join(leaf[row].tobytes() for leaf in flat) for row in range(len(flat[0])))
    return [blake2b(each, digest_size=DIGEST).digest() for each in seen]
