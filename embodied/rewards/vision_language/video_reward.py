"""Rewards from a vision-language model that looks at frames of complete episodes.

The frames of an episode that ended wait for the model; a thread asks, and training goes on. The
answer gives the progress Phi of every observation of the episode, and

    r = env_weight r_env + scale F(Phi, Phi')       (F: `rewards.fitted.SHAPINGS`)

where Phi is 0 until there is an answer, and where there was none. Transitions are rewarded when
they are sampled, so that old ones get late answers. Recorded episodes are asked about at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from embodied.core import distributed
from embodied.core.bounds import Bound, Count, Number
from embodied.core.build import ConfigError, Node
from embodied.core.env import Step, VecEnv
from embodied.core.remembered import Remembered
from embodied.core.reward import SummedReward
from embodied.core.spec import Spec
from embodied.core.tensors import Tensors
from embodied.llm.ask_pool import AskPool
from embodied.llm.chat import BudgetSpent, ChatError, ServerUnusable
from embodied.llm.client import open_chat
from embodied.nn.statistics import spearman
from embodied.rewards.fitted import SHAPINGS
from embodied.rewards.vision_language.clip import require_picture
from embodied.rewards.wrappers.added_observations import (
    PICTURE,
    VIDEO_INDEX,
    EpisodeVideoWrapper,
    Video,
    VideoRecorder,
    with_render,
)
from embodied.vision.image_text import resized

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VideoConfig:
    """Settings of rewards from a model that looks at videos."""

    chat: Node  # the vision-language model
    goal: str | None = None  # the task in one sentence; null: the environment's text
    picture: str | None = None  # image observation; null: rendered at `size` pixels
    size: Annotated[int, Bound(8)] = 128  # side of rendered images, pixels
    frames: Annotated[int, Bound(2)] = 8  # largest number of images of an episode that it gets
    pixels: Annotated[int, Bound(8)] = 256  # largest longer side of an image that it gets
    value: Literal["gain", "potential", "level"] = "gain"  # form of the reward, of the progress
    scale: Number = 1.0  # weight of that
    env_weight: Number = 1.0  # weight of the environment's reward
    parallel: Count = 4  # episodes that are asked about at a time
    room: Count = 64  # episodes that wait; the oldest are dropped
    synchronous: bool = False  # training waits for the answers, so that it is repeatable


@dataclass(frozen=True)
class Progress:
    """`progress` [T] of an episode's observations; `order`: the rank correlation with time of what
    the model said (None: it was asked about one frame)."""

    progress: Tensor
    order: float | None


class VideoReward(Remembered, SummedReward):
    """Subclasses ask about the frames of an episode (`ask`)."""

    frozen = False
    needs_local_env = True
    remembered = ("recorder", "phi", "counts", "order", "ordered", "spent")
    interpolated = True
    """Whether the progress of other observations is between those of the nearest frames; otherwise
    it is 0. The first frame then has progress 0 without being asked about."""

    def __init__(self, config: Any, spec: Spec, folder: Path) -> None:
        if distributed.world() > 1:
            raise ConfigError("videos are asked about in one process: start without torchrun")
        require_picture(config.picture, spec)
        goal = config.goal or spec.text
        if not goal:
            raise ConfigError('no goal: set reward.goal="..."')
        self.config = config
        self.goal = goal
        self.chat = open_chat(config.chat, folder)
        self.recorder = VideoRecorder(config.frames)
        self.pool = AskPool[str, Progress](
            lambda keys: [self._progress_of(self.waiting[key]) for key in keys],
            workers=config.parallel,
            room=config.room,
            synchronous=config.synchronous,
        )
        self.waiting: dict[str, Video] = {}  # unanswered episodes, by their last observation
        self.phi = torch.zeros(0)  # by the number of the observation
        self.counts = dict.fromkeys(("labelled", "abstained", "dropped"), 0)
        self.order = 0.0  # mean rank correlation of answers with time
        self.ordered = 0  # episodes in that mean
        self.spent = ""

    def augment_env(self, env: VecEnv) -> VecEnv:
        """The environment with the numbers of its observations; its frames are recorded."""
        name = self.config.picture or PICTURE
        rendered = with_render(env, self.config.size) if name == PICTURE else env
        return EpisodeVideoWrapper(rendered, self.recorder, name, hidden=rendered is not env)

    def augment_episode(self, obs: Tensors) -> Tensors:
        """The numbers of a recorded episode's observations, after asking about it."""
        name = self.config.picture or PICTURE
        if name not in obs:
            raise ConfigError(f"the episodes have no image {name}: choose one, reward.picture=NAME")
        numbers = self.recorder.count + torch.arange(len(obs[name]))
        self.recorder.count += len(numbers)
        video = Video(numbers.tolist(), list(range(len(numbers))), [*obs[name]])
        try:
            self._take_in(video, self._progress_of(video))
        except BudgetSpent as error:
            raise ServerUnusable(str(error)) from error
        except ChatError as error:
            self.counts["abstained"] += 1
            logger.warning("no answer about a recorded episode: %s", error)
        return {VIDEO_INDEX: numbers}

    @property
    def unanswered(self) -> int:
        return self.counts["abstained"]

    def observe_step(self, transitions: Tensors, env_ids: Tensor, step: Step) -> None:
        for video in self.recorder.take():
            key = str(video.numbers[-1])
            self.waiting[key] = video
            for dropped in self.pool.submit([key]):
                del self.waiting[dropped]
                self.counts["dropped"] += 1

    def set_step(self, step: int) -> None:
        for asked in self.pool.poll():
            video = self.waiting.pop(asked.question)
            if asked.answer is None:
                self.counts["abstained"] += 1
                logger.info("no answer about an episode: %s", asked.why)
            else:
                self._take_in(video, asked.answer)
        if self.pool.spent and not self.spent:
            self.spent = self.pool.spent
            logger.warning("no more answers: %s", self.spent)

    def components(self, transitions: Tensors) -> dict[str, Tensor]:
        config, reward = self.config, transitions["reward"]
        before, after = (
            self._phi(transitions[f"{end}/{VIDEO_INDEX}"]) for end in ("obs", "next_obs")
        )
        value = SHAPINGS[config.value](before.to(reward), after.to(reward), transitions["discount"])
        return {"env": config.env_weight * reward, "video": config.scale * value}

    def update(self, transitions: Tensors) -> dict[str, Tensor]:
        """Nothing is learned from transitions; returns shares of the episodes so far by outcome,
        and metrics of the answers."""
        ended = max(sum(self.counts.values()), 1)
        facts = {name: count / ended for name, count in self.counts.items()}
        facts |= {"queue": self.pool.pending, "voc": self.order}
        facts["latency"] = self.pool.seconds / max(self.pool.calls, 1)
        return {name: torch.tensor(float(value)) for name, value in facts.items()}

    def get_state(self) -> dict[str, Any]:
        """Everything but answers in flight: their episodes are submitted again."""
        self.set_step(0)
        unanswered = {key: self.waiting[key].get_state() for key in self.pool.questions()}
        return {**super().get_state(), "unanswered": unanswered}

    def set_state(self, state: dict[str, Any]) -> None:
        self.pool.clear()
        super().set_state(state)
        self.waiting = {key: Video.from_state(one) for key, one in state["unanswered"].items()}
        self.pool.submit(list(self.waiting))

    def _phi(self, numbers: Tensor) -> Tensor:
        """Phi [N] of observations by their numbers; 0 where it is not known."""
        numbers = numbers.cpu()
        known = numbers < len(self.phi)
        found = torch.zeros(len(numbers))
        found[known] = self.phi[numbers[known]]
        return found

    def _progress_of(self, video: Video) -> Progress:
        """Progress of an episode's observations, by the model."""
        places, images = video.sampled(self.config.frames)
        index, value = self.ask(shrunk(images, self.config.pixels))
        if not bool(value.isfinite().all()):
            raise ChatError(f"its progress is {value.tolist()}")
        asked = value[1:] if self.interpolated else value
        order = spearman(asked, np.arange(len(asked)), undefined=0.0) if len(asked) > 1 else None
        at = np.array([places[i] for i in index])
        every = np.arange(len(video.numbers))
        if self.interpolated:
            progress = torch.from_numpy(np.interp(every, at, value.numpy())).float()
        else:
            progress = torch.zeros(len(every)).index_put((torch.from_numpy(at),), value.float())
        return Progress(progress, order)

    def ask(self, images: Tensor) -> tuple[Sequence[int], Tensor]:
        """The indices of frames [k] in `images` [n, H, W, 3] and their progress [k] in [0, 1].
        ChatError if there is no usable answer. Called in a thread."""
        raise NotImplementedError(f"{type(self).__name__} asks nothing")

    def _take_in(self, video: Video, found: Progress) -> None:
        if (more := video.numbers[-1] + 1 - len(self.phi)) > 0:
            self.phi = torch.cat([self.phi, torch.zeros(max(more, len(self.phi)))])
        self.phi[torch.tensor(video.numbers)] = found.progress
        self.counts["labelled"] += 1
        if found.order is not None:
            self.ordered += 1
            self.order += (found.order - self.order) / self.ordered


def shrunk(images: Tensor, most: int) -> Tensor:
    """Images [n, H, W, 3] whose longer side has at most `most` pixels."""
    height, width = images.shape[1:3]
    if max(height, width) <= most:
        return images
    share = most / max(height, width)
    size = max(1, round(height * share)), max(1, round(width * share))
    chw = resized(images.permute(0, 3, 1, 2).contiguous(), size, "bilinear")
    return chw.permute(0, 2, 3, 1).contiguous()
