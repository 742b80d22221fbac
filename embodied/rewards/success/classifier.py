"""Success classifier as a reward, from images or vectors, updated with the policy's observations.

Positives are the last frames of successful episodes of datasets, negatives all others; the network
is trained and calibrated on held-out episodes (`embodied.rewards.success.model`). Every
`refit_every` updates it is trained further with the policy's recent observations as negatives
(VICE, Fu et al., 2018), so that states which merely fool it lose their reward. If the environment
reports success, false positives at episode ends are counted.

    r = 1[p(next_obs) > threshold] (1 - discount)

At a termination the discount is 0 and the reward of a success 1. Otherwise it is 1 - gamma^k:
staying there for ever is worth 1 too, so that no false positive is worth more than one success.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core import tensors as tt
from embodied.core.bounds import Count, CountOrZero, Fraction
from embodied.core.build import ConfigError, parse
from embodied.core.device import forked
from embodied.core.env import Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.reward import Reward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.rewards.fitted import require_observed
from embodied.rewards.success.model import (
    LabelledFrames,
    Training,
    learn,
    load_labelled,
    made,
    mark_of,
    read,
    read_card,
    with_successes,
    write,
)
from embodied.rewards.wrappers.added_observations import with_pictures
from embodied.rewards.wrappers.success_detector import SuccessDetector

LEAST_OWN = 16  # observations of the policy needed for a refit with them


@dataclass(frozen=True)
class Config:
    """Settings of the success classifier. A refit uses up to `recent_size` observations of the
    policy as negatives, and with `marked` the ends of successful episodes as positives."""

    data: str | tuple[str, ...] | None = None  # labelled datasets to train on
    trained: str | None = None  # folder of `embodied reward classifier`; null: trained on `data`
    training: Training = field(default_factory=Training)  # training of the classifier
    refit_every: CountOrZero = 1000  # updates of the learner between refits; 0: never
    refit_updates: Count = 100  # gradient steps of a refit
    recent_size: Count = 4096  # newest observations of the policy that are kept for refits
    marked: bool = False  # successes marked by the environment or an operator are positives
    watch: Count = 100  # unsuccessful episode ends over which false positives are counted
    limit: Fraction = 0.05  # fraction of false positives above which there is a warning
    terminate: bool = False  # a training episode ends as a success when it is detected
    steps: Count = 3  # consecutive steps in which it must be detected


class RecentBuffer(Remembered):
    """A ring buffer of `size` observations (leaves [N, ...]) on the CPU; `seen` counts all that
    were ever added."""

    remembered = ("ring", "seen")

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen = 0
        self.ring: Tensors = {}

    def push(self, moments: Tensors) -> None:
        count = min(tt.length(moments), self.size)
        at = (self.seen + torch.arange(count)) % self.size
        for name, value in moments.items():
            if name not in self.ring:
                self.ring[name] = torch.zeros((self.size, *value.shape[1:]), dtype=value.dtype)
            self.ring[name][at] = value[len(value) - count :].cpu()
        self.seen += count

    def kept(self) -> Tensors:
        """The stored observations, unordered; {} while empty."""
        return {name: value[: min(self.seen, self.size)] for name, value in self.ring.items()}


class Classifier(Remembered, Reward):
    """`version` 1 is trained on the datasets; the newest version is written to the run's
    `folder`."""

    frozen = False
    remembered = (
        "net",
        "calibration",
        "version",
        "recent",
        "recent_successes",
        "updates",
        "warned",
        "mistakes",
    )

    def __init__(
        self, config: Config, spec: Spec, device: torch.device, seed: int, folder: Path
    ) -> None:
        self.config = config
        self.device = device
        self.folder = folder
        if distributed.world() > 1:
            raise ConfigError(
                "with several processes each would learn its own reward; train in one"
            )
        self.data: LabelledFrames | None = None
        self.sources: tuple[str, ...] = ()
        self.seed = seed
        if config.trained is None:
            self._first_version()
        else:
            self._read(Path(config.trained))
        require_observed(self.leaves, spec)
        self.net.to(device).eval()
        self.recent = RecentBuffer(config.recent_size)
        self.recent_successes = RecentBuffer(config.recent_size)
        self.updates = 0
        self.mistakes: list[bool] = []
        self.warned = 0

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with rendered images, if they are needed and not observed, and with
        episodes that end at a detected success (`terminate`)."""
        env = with_pictures(env, self.leaves)
        if not self.config.terminate:
            return env

        def detect(obs: Tensors) -> Tensor:
            return self.passes({name: obs[name].to(self.device) for name in self.leaves})

        return SuccessDetector(env, detect, self.config.steps)

    @torch.no_grad()
    def probability(self, obs: Tensors) -> Tensor:
        """Calibrated probability [N] of success of observations (leaves [N, ...])."""
        return self.calibration.probability(self.net({name: obs[name] for name in self.leaves}))

    def passes(self, obs: Tensors) -> Tensor:
        """Whether observations pass for success, [N] (bool)."""
        return self.probability(obs) > self.calibration.threshold

    def __call__(self, transitions: Tensors) -> Tensor:
        return self.passes(tt.under(transitions, "next_obs")) * (1 - transitions["discount"])

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        """Store observations as negatives; count false positives at episode ends."""
        following = {name: transitions[f"next_obs/{name}"] for name in self.leaves}
        going = (transitions["discount"] > 0).nonzero().flatten()
        if self.config.refit_every and len(going):
            self.recent.push(tt.take(following, going))
        ended = step.ended.to(env_ids.device)[env_ids]
        if "success" not in step.log or not bool(ended.any()):
            return
        success = step.log["success"].to(env_ids.device)[env_ids].bool()
        won = (ended & success).nonzero().flatten()
        if self.config.marked and len(won):
            self.recent_successes.push(tt.take(following, won))
        failed = (ended & ~success).nonzero().flatten()
        if len(failed):
            self.mistakes += self.passes(tt.take(following, failed)).tolist()
            self.mistakes = self.mistakes[-self.config.watch :]
            self._warn()

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        """Called after every update of the learner; refits every `refit_every` calls."""
        self.updates += 1
        every = self.config.refit_every
        if every and self.updates % every == 0:
            assert self.data is not None, "refits need the datasets"
            data = with_successes(self.data, self.recent_successes.kept())
            own = self.recent.kept() if self.recent.seen >= LEAST_OWN else {}
            with forked():
                net, count = self.net.cpu(), self.config.refit_updates
                self.calibration = learn(net, data, own, self.how, count, self.seed, self.version)
            self.net.to(self.device)
            self.version += 1
            self._write("newest")
        facts = {"version": self.version, "threshold": self.calibration.threshold}
        if self.mistakes:
            facts["false_positives"] = sum(self.mistakes) / len(self.mistakes)
        return {name: torch.tensor(float(value)) for name, value in facts.items()}

    def _first_version(self) -> None:
        """Version 1: loaded from the run's folder if it is there, else trained on the datasets."""
        if not self.config.data:
            raise ConfigError(
                "no episodes to learn from: set reward.data=[DIR,...], or "
                "reward.trained=DIR (from `embodied reward classifier`)"
            )
        how, first = self.config.training, self.folder / "v1"
        self.data, self.leaves = load_labelled(_several(self.config.data), how, self.seed)
        mark = mark_of(self.data, how, self.seed)
        if (first / "card.json").exists() and read_card(first)["fingerprint"] == mark:
            self._read(first)
            return
        self.net, self.calibration = made(self.data, self.leaves, how, self.seed)
        self.how = how
        self.version = 1
        self.mark = mark
        self._write("v1")

    def _read(self, folder: Path) -> None:
        """Load a version, and for refits the datasets it was trained on."""
        self.net, self.leaves, self.calibration, card = read(folder)
        self.how = parse(Training, card["training"], str(folder))
        self.version = card["version"]
        self.mark = card["fingerprint"]
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

    def _warn(self) -> None:
        """Warn once per version, given enough episodes."""
        rate = sum(self.mistakes) / len(self.mistakes)
        full = len(self.mistakes) == self.config.watch
        if full and rate > self.config.limit and self.warned < self.version:
            self.warned = self.version
            print(
                f"classifier: version {self.version} takes {rate:.0%} of the last "
                f"{len(self.mistakes)} unsuccessful episode ends for successes "
                f"(limit {self.config.limit:.0%}); add such episodes to reward.data",
                flush=True,
            )


def _several(folders: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return (folders,) if isinstance(folders, str) else tuple(folders)
