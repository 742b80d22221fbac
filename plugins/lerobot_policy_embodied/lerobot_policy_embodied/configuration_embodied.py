"""Settings of `--policy.type=embodied`."""

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import FeatureType, NormalizationMode
from lerobot.configs.policies import PreTrainedConfig


@PreTrainedConfig.register_subclass("embodied")
@dataclass
class EmbodiedConfig(PreTrainedConfig):
    """`checkpoint`: a run or a checkpoint's folder; or `url` and `token` of `embodied serve`.

    `leaves`: the vector observations of the policy by name, with how many numbers each has; in this
    order they are the last numbers of `observation.state`. `images`: its image observations,
    `observation.images.NAME` (height, width). `n_action_steps` of each chunk are executed (0: the
    whole chunk)."""

    checkpoint: str = ""
    url: str = ""
    token: str = ""
    leaves: dict[str, int] = field(default_factory=dict)
    images: dict[str, list[int]] = field(default_factory=dict)
    chunk_size: int = 1
    n_action_steps: int = 0
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {kind.value: NormalizationMode.IDENTITY for kind in FeatureType}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.n_action_steps <= self.chunk_size:
            raise ValueError(f"n_action_steps should be from 0 to {self.chunk_size}, the chunk")

    @property
    def observation_delta_indices(self) -> None:
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        return None

    def validate_features(self) -> None:
        """The policy checks what it gets."""

    def get_optimizer_preset(self) -> Any:
        raise NotImplementedError("train it with `embodied train`, not with lerobot-train")

    def get_scheduler_preset(self) -> None:
        return None
