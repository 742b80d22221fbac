"""Recorded episodes in the latents of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from embodied.core import tensors as tt
from embodied.core.build import ConfigError
from embodied.core.spec import require_same
from embodied.datasets.lerobot.pictures import load
from embodied.datasets.lerobot.reader import Episodes
from embodied.models.dynamics import LATENT, LatentDynamics
from embodied.models.dynamics import load as load_model


def load_latent(folder: Path | str) -> LatentDynamics:
    """The latent model in `folder`; ConfigError for one without latents."""
    model = load_model(folder)
    if not isinstance(model, LatentDynamics):
        raise ConfigError(
            f"the model {folder} has no latents; fit one that has: "
            "embodied model train model=recurrent demos=DIR out=DIR"
        )
    return model


@torch.no_grad()
def encoded(model: LatentDynamics, episodes: Episodes, where: str) -> Episodes:
    """`episodes`, of the dataset `where`, with the observation `latent` in place of all others.

    Each is filtered from its first observation on. SpecMismatch if they are not of the model's
    environment.
    """
    require_same(model.data_spec, episodes.spec, "the model", f"dataset {where}")
    device = next(model.parameters()).device
    size = model.spec.obs[LATENT].size
    count, total = len(episodes), int(episodes.length.sum())
    steps, final = torch.zeros(total, size), torch.zeros(count, size)
    frames = {
        name: torch.cat([episodes.steps[f"obs/{name}"], episodes.final[name]])
        for name in model.names
    }
    action = model.choices.one_hot(episodes.steps["action"].to(device))
    latent = torch.zeros(count, size, device=device)
    for t in range(int(episodes.length.max()) + 1):
        here = (episodes.length >= t).nonzero().flatten()
        at = episodes.start[here] + t
        last = episodes.length[here] == t
        rows = torch.where(last, total + here, at)
        obs = tt.to(load(tt.take(frames, rows)), device)
        done = action[at - 1] if t else torch.zeros_like(action[at.clamp(max=total - 1)])
        filtered = model.filtered(latent[here.to(device)], done, obs)
        latent[here.to(device)] = filtered
        now = filtered.cpu()
        steps[at[~last]] = now[~last]
        final[here[last]] = now[last]
    others = {key: value for key, value in episodes.steps.items() if not key.startswith("obs/")}
    return replace(
        episodes,
        spec=replace(model.spec, text=episodes.spec.text, tasks=episodes.spec.tasks),
        steps={**others, f"obs/{LATENT}": steps},
        final={LATENT: final},
    )
