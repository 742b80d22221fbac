"""Success classifier network: training, calibration, and its versions on disk.

Labels say which frames of labelled episodes show success. Training batches are half positives, half
negatives, so the log odds are corrected on held-out episodes for the true fraction pi
of successes, then divided by a temperature (Guo et al., 2017):

    p = sigma((z + log(pi / (1 - pi))) / T),   T = argmin of the log loss on held-out EPISODES

A frame counts as success above the threshold that at most a given fraction of negatives exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import binary_cross_entropy_with_logits

from embodied.core import tensors as tt
from embodied.core.bounds import (
    Bound,
    Count,
    CountOrZero,
    Fraction,
    Number,
    Positive,
    PositiveFraction,
    Units,
)
from embodied.core.build import ConfigError, parse
from embodied.core.device import device_of, forked
from embodied.core.files import MALFORMED, FileError, read_json, reading
from embodied.core.saved_file import fitting, load_tensors
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.reader import Episodes, read_episodes
from embodied.models.latent_policy import encoded, load_latent
from embodied.nn.networks import mlp
from embodied.nn.optim import fit, held_out
from embodied.policies.networks.encoders import Encoder, ImageConfig
from embodied.rewards.fitted import (
    all_frames,
    fingerprint,
    save_fitted,
    shared_leaves,
    shift_images,
)
from embodied.vision.contrastive import open_image_text

BINS = 10
LEAST = 0.5  # lowest threshold

WEIGHTS, CARD = "network.safetensors", "card.json"


@dataclass(frozen=True)
class Training:
    """Settings of the classifier's network, labels, training and calibration. Frames before the
    `margin` are negatives."""

    views: tuple[str, ...] = ("state",)  # observations to use
    model: str | None = None  # frozen encoder of images: "simclip", a folder, hub name; null: a CNN
    hidden: tuple[Units, ...] = (64, 64)  # units of the hidden layers
    channels: tuple[Units, ...] = (16, 32, 32)  # channels of the CNN
    updates: Count = 600  # gradient steps of the first version
    batch_size: Annotated[int, Bound(2)] = 64  # frames per gradient step, half of them positives
    lr: PositiveFraction = 1e-3  # AdamW's learning rate
    shift: CountOrZero = 2  # largest shift of images, pixels
    last: Count = 1  # last frames of a successful episode that are positives
    margin: CountOrZero = 1  # frames before these that are skipped
    held_out: Fraction = 0.25  # fraction of episodes for calibration; at least one of each kind
    false_positives: Fraction = 0.01  # fraction of negatives that may exceed the threshold
    shuffle: bool = False  # permute the labels: a control experiment
    latents: str | None = None  # model whose latents are seen, with views=[latent]
    contrastive: Fraction = 0.0  # share of the contrastive loss; the rest is the log loss
    temperature: Positive = 0.5  # of the contrastive loss


@dataclass(frozen=True)
class LabelledFrames:
    """Frames (leaves [N, ...]), `label` [N] (float, 1: success) and `episode` [N] (int64)."""

    moments: Tensors
    label: Tensor
    episode: Tensor

    def at(self, index: Tensor) -> LabelledFrames:
        return LabelledFrames(tt.take(self.moments, index), self.label[index], self.episode[index])


def load_labelled(
    folders: Sequence[str], how: Training, seed: int
) -> tuple[LabelledFrames, dict[str, Leaf]]:
    """The labelled frames of datasets, and the specs of their observations."""
    parts = [read_episodes(Path(folder)) for folder in folders]
    if how.latents is not None:
        model = load_latent(how.latents)
        parts = [encoded(model, *pair) for pair in zip(parts, folders, strict=True)]
    leaves = shared_leaves(how.views, [part.spec for part in parts])
    made, count = [], 0
    for folder, part in zip(folders, parts, strict=True):
        made.append(_labels(part, folder, leaves, how, count))
        count += len(part)
    whole = LabelledFrames(
        tt.cat([one.moments for one in made]),
        torch.cat([one.label for one in made]),
        torch.cat([one.episode for one in made]),
    )
    if how.shuffle:
        order = torch.randperm(len(whole.label), generator=torch.Generator().manual_seed(seed))
        whole = replace(whole, label=whole.label[order])
    return whole, leaves


def _labels(
    episodes: Episodes, folder: str, leaves: Mapping[str, Leaf], how: Training, first: int
) -> LabelledFrames:
    if "success" not in episodes.steps:
        raise ConfigError(f"{folder} has no column `success` that labels successful episodes")
    moments, episode = all_frames(episodes, leaves)
    ends = episodes.start + episodes.length - 1
    won = episodes.steps["success"][ends].bool()
    length = episodes.length + 1
    left = (length.cumsum(0) - 1)[episode] - torch.arange(len(episode))  # 0: the last frame
    success = won[episode] & (left < how.last)
    kept = (success | ~won[episode] | (left >= how.last + how.margin)).nonzero().flatten()
    return LabelledFrames(moments, success.float(), episode + first).at(kept)


def with_successes(whole: LabelledFrames, moments: Tensors) -> LabelledFrames:
    """`whole` plus the positives `moments` (leaves [M, ...]; {}: none), each as an episode of its
    own."""
    if not moments:
        return whole
    count = tt.length(moments)
    return LabelledFrames(
        tt.cat([whole.moments, moments]),
        torch.cat([whole.label, torch.ones(count)]),
        torch.cat([whole.episode, int(whole.episode.max()) + 1 + torch.arange(count)]),
    )


def split(whole: LabelledFrames, share: float, seed: int) -> tuple[LabelledFrames, LabelledFrames]:
    """Training and held-out frames, split by episode; both contain successes."""
    won = torch.unique(whole.episode[whole.label > 0])
    every = torch.unique(whole.episode)
    others = every[~torch.isin(every, won)]
    if len(won) < 2:
        raise ConfigError(
            f"{len(won)} successful episodes are too few to train and to calibrate: "
            "at least 2 are needed"
        )
    random = torch.Generator().manual_seed(seed)
    held = torch.cat([part[held_out(len(part), share, random)] for part in (won, others)])
    aside = torch.isin(whole.episode, held)
    return whole.at((~aside).nonzero().flatten()), whole.at(aside.nonzero().flatten())


@dataclass(frozen=True)
class Calibration:
    """How logits become probabilities, and the quality of that on the held-out episodes."""

    prior: Number  # log odds that are added
    temperature: Positive  # by which the logits are divided
    threshold: Number  # probability from which on a success is said
    error_before: Number  # expected calibration error before it
    error: Number  # and after it
    loss_before: Number  # log loss before it
    loss: Number  # and after it
    found: Number  # share of the successes that are said to be some
    mistaken: Number  # share of the others that are
    successes: CountOrZero  # in the held-out episodes
    others: CountOrZero  # in the held-out episodes

    def probability(self, logits: Tensor) -> Tensor:
        """The calibrated probability [N] of success for `logits` [N]."""
        return ((logits + self.prior) / self.temperature).sigmoid()


def calibrate(logits: Tensor, label: Tensor, prior: float, rate: float) -> Calibration:
    """Calibrate on held-out `logits` [N] and `label` [N]; `prior`: log odds of success; `rate`:
    allowed false positives."""
    logits = logits.double() + prior
    label = label.double()
    temperature = best_temperature(logits, label)
    before, after = logits.sigmoid(), (logits / temperature).sigmoid()
    threshold = threshold_for(after[label == 0], rate)
    passed = after > threshold
    return Calibration(
        prior,
        temperature,
        threshold,
        reliability(before, label),
        reliability(after, label),
        float(binary_cross_entropy_with_logits(logits, label)),
        float(binary_cross_entropy_with_logits(logits / temperature, label)),
        float(passed[label > 0].double().mean()),
        float(passed[label == 0].double().mean()),
        int((label > 0).sum()),
        int((label == 0).sum()),
    )


def best_temperature(logits: Tensor, label: Tensor) -> float:
    """The temperature in [0.25, 20] with the lowest log loss, to 0.1%, by golden-section search
    (the loss is convex in 1 / T)."""
    low, high = 1 / 20.0, 1 / 0.25
    ratio = (math.sqrt(5) - 1) / 2

    def loss(inverse: float) -> float:
        return float(binary_cross_entropy_with_logits(logits * inverse, label))

    while high - low > 1e-3 * low:
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, two) if loss(one) <= loss(two) else (one, high)
    return 2 / (low + high)


def reliability(p: Tensor, label: Tensor) -> float:
    """Expected calibration error over ten bins: sum of fraction x |mean p - fraction of
    successes|."""
    where = (p * BINS).long().clamp(max=BINS - 1)
    off = torch.zeros(BINS, dtype=p.dtype).index_add_(0, where, p - label)
    return float(off.abs().sum() / len(p))


def threshold_for(others: Tensor, rate: float) -> float:
    """The lowest threshold, at least 0.5, that at most a fraction `rate` of the negatives'
    probabilities `others` [N] exceeds."""
    if not len(others):
        return LEAST
    allowed = min(int(rate * len(others) + 1e-9), len(others) - 1)
    return max(LEAST, float(others.sort(descending=True).values[allowed]))


class SuccessNet(nn.Module):
    """Frames (leaves [N, ...]) to logits [N] of success."""

    def __init__(self, leaves: Mapping[str, Leaf], how: Training) -> None:
        super().__init__()
        self.pictures = [k for k, v in leaves.items() if v.is_image and how.model is not None]
        seen = {k: v for k, v in leaves.items() if k not in self.pictures}
        images = ImageConfig(how.channels, features=32)
        self.encoder = Encoder(seen, images, asymmetric=True) if seen else None
        # In a tuple: the frozen encoder is not a submodule, hence neither trained nor saved.
        self.eyes = (open_image_text(how.model),) if self.pictures and how.model else ()
        size = 0 if self.encoder is None else self.encoder.size
        size += sum(len(self.pictures) * eyes.size for eyes in self.eyes)
        self.head = mlp(size, how.hidden, 1)

    def fit(self, moments: Tensors) -> None:
        """Fit the normaliser of vectors."""
        if self.encoder is not None:
            self.encoder.fit(tt.nest(moments, "obs"))

    def forward(self, moments: Tensors) -> Tensor:
        return self.head[-1](self.features(moments))[:, 0]

    def features(self, moments: Tensors) -> Tensor:
        """The last hidden layer [N, units]."""
        parts = [] if self.encoder is None else [self.encoder(moments)]
        with torch.no_grad():
            shown = [eyes.images(moments[k]) for eyes in self.eyes for k in self.pictures]
        parts += [each.to(device_of(self.head)) for each in shown]
        return self.head[:-1](torch.cat(parts, 1))


def train(
    net: SuccessNet, data: LabelledFrames, own: Tensors, how: Training, updates: int, seed: int
) -> float:
    """`updates` of half positives, half negatives (half of these from the policy's recent
    observations `own`, if there are any); returns the mean loss of the last tenth."""
    random = torch.Generator().manual_seed(seed)
    yes, no = (data.label > 0).nonzero().flatten(), (data.label == 0).nonzero().flatten()
    half = how.batch_size // 2
    mine = half // 2 if own else 0
    label = torch.cat([torch.ones(half), torch.zeros(half)]).to(data.label.device)

    def loss() -> Tensor:
        parts = [_sample(data.moments, yes, half, random)]
        parts.append(_sample(data.moments, no, half - mine, random))
        if mine:
            parts.append(_sample(own, torch.arange(tt.length(own)), mine, random))
        features = net.features(shift_images(tt.cat(parts), how.shift, random))
        log_loss = binary_cross_entropy_with_logits(net.head[-1](features)[:, 0], label)
        if not how.contrastive:
            return log_loss
        apart = contrastive_loss(features, label, how.temperature)
        return (1 - how.contrastive) * log_loss + how.contrastive * apart

    net.train()
    late = fit(net.parameters(), loss, updates, how.lr)
    net.eval()
    return late


def contrastive_loss(features: Tensor, label: Tensor, temperature: float) -> Tensor:
    """Supervised contrastive loss (Khosla et al., 2020) of features [N, units] with `label` [N]:

    mean_i -mean_{p: same label, p != i} log softmax_{a != i}(cos(f_i, f_a) / temperature)_p
    """
    unit = functional.normalize(features, dim=1)
    own = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    alike = (unit @ unit.T / temperature).masked_fill(own, -torch.inf)
    log_share = alike.log_softmax(1).masked_fill(own, 0.0)
    same = (label[:, None] == label[None]) & ~own
    return -((log_share * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def _sample(moments: Tensors, among: Tensor, n: int, random: torch.Generator) -> Tensors:
    pick = torch.randint(len(among), (n,), generator=random)
    return tt.take(moments, among[pick].to(next(iter(moments.values())).device))


def learn(
    net: SuccessNet,
    whole: LabelledFrames,
    own: Tensors,
    how: Training,
    updates: int,
    seed: int,
    turn: int = 0,
) -> Calibration:
    """Train on some episodes and calibrate on the others. `seed` determines the split, `turn` the
    batches; of the policy's observations `own`, every fourth is used for calibration."""
    data, held = split(whole, how.held_out, seed)
    others = {k: v[torch.arange(len(v)) % 4 > 0] for k, v in own.items()}
    train(net, data, others, how, updates, seed + turn)
    aside = {k: v[::4] for k, v in own.items()}
    with torch.no_grad():
        logits = [net(held.moments), *([net(aside)] if own else [])]
    zeros = torch.zeros(len(torch.cat(logits)) - len(held.label))
    share = float(whole.label.mean())
    prior = math.log(share / (1 - share))
    return calibrate(torch.cat(logits), torch.cat([held.label, zeros]), prior, how.false_positives)


def made(
    whole: LabelledFrames, leaves: Mapping[str, Leaf], how: Training, seed: int
) -> tuple[SuccessNet, Calibration]:
    """A newly trained network; torch's global random state is not changed."""
    with forked(seed):
        net = SuccessNet(leaves, how)
        net.fit(whole.moments)
        return net, learn(net, whole, {}, how, how.updates, seed)


def mark_of(whole: LabelledFrames, how: Training, seed: int) -> str:
    """The fingerprint of the first version."""
    return fingerprint(how, seed, [*whole.moments.values(), whole.label, whole.episode])


def write(
    folder: Path,
    net: SuccessNet,
    leaves: Mapping[str, Leaf],
    calibration: Calibration,
    facts: Mapping[str, Any],
) -> None:
    """Write weights and card of a version."""
    shown = {name: leaf.to_json() for name, leaf in leaves.items()}
    card = {**facts, "calibration": asdict(calibration), "leaves": shown}
    save_fitted(net, folder / WEIGHTS, folder / CARD, card)


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a version; ConfigError if there is none."""
    try:
        return read_json(folder / CARD)
    except (OSError, FileError) as error:
        raise ConfigError(
            f"{folder} has no trained classifier ({error}); train one: "
            "embodied reward classifier DATASET... out=DIR"
        ) from error


def read(folder: Path) -> tuple[SuccessNet, dict[str, Leaf], Calibration, dict[str, Any]]:
    """A version as `write` wrote it, with its card."""
    card = read_card(folder)
    with reading(folder / CARD, *MALFORMED):
        how: Training = parse(Training, card["training"], str(folder))
        leaves = {name: Leaf.from_json(leaf) for name, leaf in card["leaves"].items()}
        calibration: Calibration = parse(Calibration, card["calibration"], str(folder))
    with reading(folder / WEIGHTS, SafetensorError, RuntimeError):
        weights = load_tensors(folder / WEIGHTS)
        with fitting(weights, folder / CARD):
            net = SuccessNet(leaves, how)
        net.load_state_dict(weights)
    return net.eval(), leaves, calibration, card
