"""Success classifier network: training, calibration, and its versions on disk.

Training batches are half positives, half negatives; `embodied.rewards.success.calibration` corrects
the probabilities on held-out episodes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, parse
from embodied.core.seeding import forked
from embodied.core.spec import Leaf
from embodied.core.tensors import Tensors
from embodied.nn.fit import fit
from embodied.nn.networks import mlp
from embodied.policies.networks.encoders import Encoder
from embodied.policies.networks.image_encoders import ImageConfig
from embodied.rewards.demonstrations.observations import shift_images
from embodied.rewards.fitted import fingerprint, save_fitted
from embodied.rewards.success.calibration import Calibration, calibrate
from embodied.rewards.success.labels import LabelledFrames, Training, split
from embodied.vision.contrastive import open_image_text

WEIGHTS, CARD = "network.safetensors", "card.json"


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
        parts = [] if self.encoder is None else [self.encoder(moments)]
        with torch.no_grad():
            shown = [eyes.images(moments[k]) for eyes in self.eyes for k in self.pictures]
        parts += [each.to(next(self.head.parameters()).device) for each in shown]
        return self.head(torch.cat(parts, 1))[:, 0]


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
        logits = net(shift_images(tt.cat(parts), how.shift, random))
        return binary_cross_entropy_with_logits(logits, label)

    net.train()
    late = fit(net.parameters(), loss, updates, how.lr)
    net.eval()
    return late


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
        return json.loads((folder / CARD).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{folder} has no trained classifier ({error}); train one: "
            "embodied reward classifier DATASET... out=DIR"
        ) from error


def read(folder: Path) -> tuple[SuccessNet, dict[str, Leaf], Calibration, dict[str, Any]]:
    """A version as `write` wrote it, with its card."""
    card = read_card(folder)
    how: Training = parse(Training, card["training"], str(folder))
    leaves = {name: Leaf.from_json(leaf) for name, leaf in card["leaves"].items()}
    net = SuccessNet(leaves, how)
    net.load_state_dict(load_file(folder / WEIGHTS))
    return net.eval(), leaves, Calibration(**card["calibration"]), card
