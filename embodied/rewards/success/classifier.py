"""Classifier: success as a network sees it, in pictures or numbers, kept honest while it is used.

Its life: positives are the last moments of successful episodes of datasets, negatives all others;
trained and calibrated on held-out episodes (`embodied.rewards.success.model`); every sampled row
is paid
by the newest version; every `refit_every` updates it learns again with what the policy does now
among the negatives (VICE, Fu et al., 2018), so that what only fools it stops paying; and where the
world knows, ends of episodes that it takes for success by mistake are counted.

    r = 1[p(next_obs) > threshold] (1 - discount)

A true end has discount 0 and pays 1. A moment after which the world goes on pays 1 - gamma^k: held
for ever that is worth 1 too, so that no mistake is worth more than one success.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.build import ConfigError, parse
from embodied.core.env import Step, VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.demonstrations.observations import require_observed
from embodied.rewards.success.calibration import Calibration
from embodied.rewards.success.labels import LabelledFrames, Training, load_labelled, with_successes
from embodied.rewards.success.model import fingerprint, learn, made, read, read_card, write
from embodied.rewards.success.recent_buffer import RecentBuffer
from embodied.rewards.wrappers.render_caption import PICTURE, with_render

LEAST_OWN = 16  # moments of the policy's own, before they say anything


@dataclass(frozen=True)
class Config:
    """`trained`: a folder that `embodied reward classifier` wrote (None: trained when the reward is
    made, from the datasets `data`). Every `refit_every` updates of the learner (0: never) it learns
    `refit_updates` more with up to `recent_size`
    moments of the policy's as negatives, and (`marked`) ends
    of episodes that the world, or a person at it, marks as success as positives. Of the last
    `watch` ends of episodes without success, a share above `limit` that passes for success is
    warned of."""

    data: str | tuple[str, ...] | None = None
    trained: str | None = None
    training: Training = field(default_factory=Training)
    refit_every: int = 1000
    refit_updates: int = 100
    recent_size: int = 4096
    marked: bool = False
    watch: int = 100
    limit: float = 0.05


class Classifier:
    """`version` 1 is that of the datasets; the newest one is in `folder` of the run."""

    frozen = False

    def __init__(
        self, config: Config, spec: Spec, device: torch.device, seed: int, folder: Path
    ) -> None:
        self.config, self.device, self.folder = config, device, folder
        if distributed.world() > 1:
            raise ConfigError("processes would each learn a reward of their own; train in one")
        self.data: LabelledFrames | None = None
        self.sources: tuple[str, ...] = ()
        self.seed = seed
        if config.trained is None:
            self._begin()
        else:
            self._read(Path(config.trained))
        require_observed(self.leaves, spec)
        self.net.to(device).eval()
        self.own, self.won = RecentBuffer(config.recent_size), RecentBuffer(config.recent_size)
        self.updates = 0
        self.mistakes: list[bool] = []
        self.warned = 0

    def augment_env(self, env: VecEnv) -> VecEnv:
        """Pictures of the world, where they are looked at and not there already."""
        if PICTURE not in self.leaves or PICTURE in env.spec.obs:
            return env
        return with_render(env, self.leaves[PICTURE].shape[0])

    @torch.no_grad()
    def probability(self, obs: Tensors) -> Tensor:
        """Calibrated probability [N] of success of observations (leaves [N, ...])."""
        logits = self.net({name: obs[name] for name in self.leaves})
        return ((logits + self.calibration.prior) / self.calibration.temperature).sigmoid()

    def __call__(self, rows: Tensors) -> Tensor:
        passed = self.probability(tt.under(rows, "next_obs")) > self.calibration.threshold
        return passed * (1 - rows["discount"])

    def observe_step(self, rows: Tensors, who: Tensor, step: Step) -> None:
        """Keep moments after which the world went on; count what passed for success and was not."""
        following = {name: rows[f"next_obs/{name}"] for name in self.leaves}
        going = (rows["discount"] > 0).nonzero().flatten()
        if self.config.refit_every and len(going):
            self.own.push(tt.take(following, going))
        ended = step.ended.to(who.device)[who]
        if "success" not in step.log or not bool(ended.any()):
            return
        success = step.log["success"].to(who.device)[who].bool()
        won = (ended & success).nonzero().flatten()
        if self.config.marked and len(won):
            self.won.push(tt.take(following, won))
        failed = (ended & ~success).nonzero().flatten()
        if len(failed):
            p = self.probability(tt.take(following, failed))
            self.mistakes += (p > self.calibration.threshold).tolist()
            self.mistakes = self.mistakes[-self.config.watch :]
            self._warn()

    def update(self, rows: Tensors) -> dict[str, Tensor]:
        """Told after every update of the learner; every so often a new version."""
        self.updates += 1
        every = self.config.refit_every
        if every and self.updates % every == 0:
            self._refit()
        facts = {"version": self.version, "threshold": self.calibration.threshold}
        return {k: torch.tensor(float(v)) for k, v in (facts | self._watched()).items()}

    def get_state(self) -> dict[str, Any]:
        return {
            "module": self.net.state_dict(),
            "calibration": asdict(self.calibration),
            "version": self.version,
            "own": self.own.get_state(),
            "won": self.won.get_state(),
            "counts": [self.updates, self.warned],
            "mistakes": list(self.mistakes),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["module"])
        self.calibration = Calibration(**state["calibration"])
        self.version = state["version"]
        self.own.set_state(state["own"])
        self.won.set_state(state["won"])
        self.updates, self.warned = state["counts"]
        self.mistakes = list(state["mistakes"])

    def _begin(self) -> None:
        """Version 1 of the datasets: read where this run's folder has it, else trained."""
        if not self.config.data:
            raise ConfigError(
                "this reward is learned from episodes: reward.data=[DIR,...], or "
                "reward.trained=DIR of `embodied reward classifier`"
            )
        how, first = self.config.training, self.folder / "v1"
        self.data, self.leaves = load_labelled(_several(self.config.data), how, self.seed)
        mark = fingerprint(self.data, how, self.seed)
        if (first / "card.json").exists() and read_card(first)["fingerprint"] == mark:
            self._read(first)
            return
        self.net, self.calibration = made(self.data, self.leaves, how, self.seed)
        self.how, self.version, self.mark = how, 1, mark
        self._write("v1")

    def _read(self, folder: Path) -> None:
        """A version that was written, and with refits the datasets it was made of."""
        self.net, self.leaves, self.calibration, card = read(folder)
        self.how = parse(Training, card["training"], str(folder))
        self.version, self.mark = card["version"], card["fingerprint"]
        self.sources = tuple(card["data"])
        if self.config.refit_every and self.data is None:
            self.data, _ = load_labelled(
                _several(self.config.data or card["data"]), self.how, self.seed
            )

    def _write(self, name: str) -> None:
        facts = {
            "version": self.version,
            "fingerprint": self.mark,
            "data": list(_several(self.config.data or self.sources)),
            "training": asdict(self.how),
        }
        write(self.folder / name, self.net, self.leaves, self.calibration, facts)

    def _refit(self) -> None:
        assert self.data is not None, "refits keep the datasets"
        data = with_successes(self.data, self.won.kept())
        own = self.own.kept() if self.own.seen >= LEAST_OWN else {}
        with torch.random.fork_rng(devices=[]):
            net, count = self.net.cpu(), self.config.refit_updates
            self.calibration = learn(net, data, own, self.how, count, self.seed, self.version)
        self.net.to(self.device)
        self.version += 1
        self._write("newest")

    def _watched(self) -> dict[str, float]:
        if not self.mistakes:
            return {}
        return {"false_positives": sum(self.mistakes) / len(self.mistakes)}

    def _warn(self) -> None:
        """Once a version, when there is something to go by."""
        rate = self._watched().get("false_positives", 0.0)
        if len(self.mistakes) < self.config.watch or rate <= self.config.limit:
            return
        if self.warned < self.version:
            self.warned = self.version
            print(
                f"classifier: version {self.version} takes {rate:.0%} of the last "
                f"{len(self.mistakes)} unsuccessful episode ends for success "
                f"(limit {self.config.limit:.0%}); give it episodes like those: reward.data",
                flush=True,
            )


def _several(folders: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return (folders,) if isinstance(folders, str) else tuple(folders)
