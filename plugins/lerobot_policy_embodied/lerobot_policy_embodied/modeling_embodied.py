"""EmbodiedPolicy: LeRobot's interface of a policy."""

from typing import Any

import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from .configuration_embodied import EmbodiedConfig
from .deciders import Here, Obs, Served

STATE = "observation.state"


class EmbodiedPolicy(PreTrainedPolicy):
    """Deterministic given an observation and the noise; without one, noise is sampled."""

    config_class = EmbodiedConfig
    name = "embodied"

    def __init__(self, config: EmbodiedConfig, **given: Any) -> None:
        super().__init__(config)
        if bool(config.checkpoint) == bool(config.url):
            raise ValueError("give either policy.checkpoint (a run's folder) or policy.url")
        self.decider = (
            Here(config.checkpoint) if config.checkpoint else Served(config.url, config.token)
        )
        if isinstance(self.decider, Here):
            self.policy = self.decider.policy  # moves to LeRobot's device with this module
        self.reset()

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: Any, *, config: Any = None, **given: Any
    ) -> Any:
        """The weights are the run's; the folder has config.json only."""
        if config is None:
            config = EmbodiedConfig.from_pretrained(pretrained_name_or_path)
        return cls(config).to(config.device).eval()

    def reset(self) -> None:
        self.decider.reset()
        self.plan: list[Tensor] = []

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Tensor], noise: Tensor | None = None, **given: Any
    ) -> Tensor:
        """[B, chunk_size, A], in a control step of its own."""
        obs = self._observed(batch)
        chunk = self.decider.decide(obs, noise, self._executed)
        self.decider.remember(obs)
        return chunk

    @torch.no_grad()
    def select_action(
        self, batch: dict[str, Tensor], noise: Tensor | None = None, **given: Any
    ) -> Tensor:
        """[B, A]; a new chunk, with `noise`, where the last one is used up."""
        obs = self._observed(batch)
        if not self.plan:
            chunk = self.decider.decide(obs, noise, self._executed)
            self.plan = list(chunk[:, : self._executed].unbind(1))
        self.decider.remember(obs)
        return self.plan.pop(0)

    @property
    def _executed(self) -> int:
        return self.config.n_action_steps or self.config.chunk_size

    def _observed(self, batch: dict[str, Tensor]) -> Obs:
        config, obs = self.config, dict[str, Tensor]()
        size = sum(config.leaves.values())
        if size:
            state = batch[STATE]
            if state.shape[-1] < size:
                raise ValueError(
                    f"{STATE} has {state.shape[-1]} numbers, the policy observes {size}: name them "
                    "with --robot.numbers (python -m lerobot_policy_embodied RUN prints them)"
                )
            parts = state[..., -size:].float().split(list(config.leaves.values()), -1)
            obs |= dict(zip(config.leaves, parts, strict=True))
        for name in config.images:
            image = batch[f"observation.images.{name}"].movedim(-3, -1)
            obs[name] = (
                image if image.dtype == torch.uint8 else (255 * image).round().to(torch.uint8)
            )
        return obs

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any] | None]:
        raise NotImplementedError("train it with `embodied train`, not with lerobot-train")

    def get_optim_params(self) -> dict[str, Any]:
        raise NotImplementedError("train it with `embodied train`, not with lerobot-train")
