"""What a run's model imagines beside the episode that is displayed."""

from __future__ import annotations

from pathlib import Path

import torch

from embodied.core import tensors as tt
from embodied.core.build import ConfigError, Node, resolve
from embodied.core.env import VecEnv
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.models.dynamics import LATENT, Dynamics, LatentDynamics, load
from embodied.viewer.session.episode import IMAGINED, Moment

SHOWN = 4  # elements that are plotted, imagined and real


class Imagination:
    """The most typical outcome of the executed actions in `model`, from the first observation of
    the episode on, without another look at it."""

    def __init__(self, model: Dynamics) -> None:
        self.model = model
        self.states: dict[int, Tensors] = {}  # by step, as the model sees it

    def reset(self) -> None:
        """Start a new episode."""
        self.states = {}

    @torch.no_grad()
    def numbers(self, before: Moment, after: Moment) -> dict[str, float]:
        """The first elements of the vectors that were imagined and observed after the step from
        `before` to `after`; of pictures the error (root mean square, 0 to 255)."""
        assert after.action is not None
        model, act = self.model, self.model.data_spec.act
        state = self.states.get(before.step)
        state = self._seen(before.obs) if state is None else state
        action = torch.tensor([after.action]).view(1, *act.shape)
        action = action.clamp(-1, 1) if act.is_continuous else action.to(getattr(torch, act.dtype))
        state = model.step(state, action, torch.zeros(1, model.noise_size)).next_obs
        self.states[after.step] = state
        found = model.decoded(state[LATENT]) if isinstance(model, LatentDynamics) else state
        numbers: dict[str, float] = {}
        for name, value in found.items():
            leaf, real = model.data_spec.obs[name], after.next_obs[name]
            if leaf.is_picture:
                off = (value.float() - real.float()).square().mean().sqrt()
                numbers[f"{IMAGINED}{name}, error"] = float(off)
                continue
            named = (
                leaf.names
                if len(leaf.names) == leaf.size
                else [f"{name} {i}" for i in range(leaf.size)]
            )
            pairs = zip(named, value.flatten().tolist(), real.flatten().tolist(), strict=True)
            for label, imagined, seen in [*pairs][: SHOWN - len(numbers) // 2]:
                numbers[f"{IMAGINED}{label}, imagined"] = imagined
                numbers[f"{IMAGINED}{label}, real"] = seen
        return numbers

    def _seen(self, obs: Tensors) -> Tensors:
        """The model's state at observations [1, ...]."""
        model, obs = self.model, tt.to(obs, "cpu")
        if not isinstance(model, LatentDynamics):
            return {name: obs[name] for name in model.spec.obs}
        empty = torch.zeros(1, model.spec.obs[LATENT].size)
        return {LATENT: model.filtered(empty, torch.zeros(1, model.choices.width), obs)}


def imagination_of(env: Node | None, spec: Spec) -> Imagination | None:
    """That of a run whose training environment has the node `env`; None where it is no model's, or
    where its model is not of the displayed environment, with `spec`."""
    try:
        if not env or not hasattr(resolve(str(env["_target_"]), VecEnv), "deployed"):
            return None
        model = load(Path(str(env["model"])))
    except (ConfigError, KeyError):
        return None
    known = {name: spec.obs.get(name) for name in model.data_spec.obs}
    same = known == {**model.data_spec.obs} and spec.act == model.data_spec.act
    return Imagination(model.requires_grad_(False)) if same else None
