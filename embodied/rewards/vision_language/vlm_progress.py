"""GVL, generative value learning: progress from shuffled frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodied.core.spec import Spec
from embodied.llm.chat import Message, object_schema
from embodied.rewards.vision_language.video_reward import VideoConfig, VideoReward


@dataclass(frozen=True)
class VlmProgressConfig(VideoConfig):
    """Settings of GVL, besides those of `VideoConfig`."""

    shuffle: bool = True  # frames in random order; false: an ablation


class VlmProgress(VideoReward):
    """Progress from a model that sees the frames of an episode in random order (GVL).

    Ma et al., "Vision language models are in-context value learners", 2024. In order, models answer
    with rising numbers whatever the frames show; shuffled, they have to look. The first frame is
    given as the one with 0%, the others without their order, and the model says how far each of
    them is; between sampled frames progress is interpolated. The rank correlation of its answers
    with time ("value-order correlation", VOC) says whether it follows the task: high in good
    recordings, low if it cannot see it, or if the episode fails.

    Differences from the source: no examples in the prompt; integers as JSON; one question an
    episode.
    """

    def __init__(self, config: VlmProgressConfig, spec: Spec, seed: int, folder: Path) -> None:
        super().__init__(config, spec, folder)
        self.seed = seed

    def ask(self, images: Tensor) -> tuple[Sequence[int], Tensor]:
        """The order depends on the seed and the number of frames, so that a cached answer is found
        again."""
        order = torch.arange(1, len(images))
        if self.config.shuffle:
            random = torch.Generator().manual_seed(self.seed)
            order = order[torch.randperm(len(order), generator=random)]
        shown = (images[0], *images[order])
        question = Message("user", prompt(self.goal, len(order), self.config.shuffle), shown)
        numbers = {"type": "integer", "minimum": 0, "maximum": 100}
        items = {"type": "array", "items": numbers, "minItems": len(order), "maxItems": len(order)}
        answer = self.chat.ask([question], dict(object_schema({"completion": items})))
        percent = torch.tensor([0, *answer.data["completion"]])
        back = torch.cat([torch.zeros(1, dtype=torch.int64), order]).argsort()
        return range(len(images)), percent[back] / 100


def prompt(goal: str, count: int, shuffled: bool) -> str:
    """The question about the first frame and `count` others."""
    order = "in random order" if shuffled else "in order"
    return (
        f'A robot tries to do this: "{goal}". The first image shows the beginning of the attempt, '
        f"where 0 percent of the task is completed. The other {count} images are moments of the "
        f"same attempt, {order}. For each of these {count}, say how much of the task is completed "
        "in it, from 0 to 100 percent, as whole numbers in the order of the images. The attempt "
        "may fail, and progress may be lost: go by what each image shows."
    )
