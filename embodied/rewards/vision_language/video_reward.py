"""Rewards from a vision-language model that looks at frames of complete episodes.

The frames of an episode that ended wait for the model; a thread asks, and training goes on. The
answer gives the progress Phi of every observation of the episode, and

    r = env_weight r_env + scale F(Phi, Phi')       (F: `rewards.fitted.SHAPINGS`)

where Phi is 0 until there is an answer, and where there was none. Transitions are rewarded when
they are sampled, so that old ones get late answers. Recorded episodes are asked about at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
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
from embodied.llm.chat import BudgetSpent, Chat, ChatError, Message, ServerUnusable, object_schema
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
from embodied.vision.contrastive import resized

logger = logging.getLogger(__name__)

TOP = 20  # alternatives of a token, as many as servers usually report
SCHEMA = object_schema({"score": {"enum": [1, 2, 3, 4, 5]}})


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


class VideoReward(Remembered, SummedReward):
    """Subclasses ask about the frames of an episode (`ask`)."""

    frozen = False
    needs_local_env = True
    remembered = ("recorder", "phi", "counts", "order", "spent")
    interpolated = True
    """Whether the progress of other observations is between those of the nearest frames; otherwise
    it is 0."""

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
        self.pool = AskPool[str, Tensor](
            lambda keys: [self._progress_of(self.waiting[key]) for key in keys],
            workers=config.parallel,
            room=config.room,
            synchronous=config.synchronous,
        )
        self.waiting: dict[str, Video] = {}  # unanswered episodes, by their last observation
        self.phi = torch.zeros(0)  # by the number of the observation
        self.counts = dict.fromkeys(("labelled", "abstained", "dropped"), 0)
        self.order = 0.0  # running mean of the rank correlation with time
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
        """Nothing is learned from transitions; returns metrics of the answers."""
        facts = {**self.counts, "queue": self.pool.pending, "voc": self.order}
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

    def _progress_of(self, video: Video) -> Tensor:
        """Progress [T] of an episode's observations, by the model."""
        places, images = video.sampled(self.config.frames)
        index, value = self.ask(shrunk(images, self.config.pixels))
        at = np.array([places[i] for i in index])
        every = np.arange(len(video.numbers))
        if self.interpolated:
            return torch.from_numpy(np.interp(every, at, value.numpy())).float()
        return torch.zeros(len(every)).index_put((torch.from_numpy(at),), value.float())

    def ask(self, images: Tensor) -> tuple[Sequence[int], Tensor]:
        """The indices of frames [k] in `images` [n, H, W, 3] and their progress [k] in [0, 1].
        ChatError if there is no usable answer. Called in a thread."""
        raise NotImplementedError(f"{type(self).__name__} asks nothing")

    def _take_in(self, video: Video, progress: Tensor) -> None:
        if (more := video.numbers[-1] + 1 - len(self.phi)) > 0:
            self.phi = torch.cat([self.phi, torch.zeros(max(more, len(self.phi)))])
        self.phi[torch.tensor(video.numbers)] = progress
        self.counts["labelled"] += 1
        order = spearman(progress, np.arange(len(progress)), undefined=0.0)
        self.order += (order - self.order) / self.counts["labelled"]


def shrunk(images: Tensor, most: int) -> Tensor:
    """Images [n, H, W, 3] whose longer side has at most `most` pixels."""
    height, width = images.shape[1:3]
    if max(height, width) <= most:
        return images
    share = most / max(height, width)
    size = max(1, round(height * share)), max(1, round(width * share))
    chw = resized(images.permute(0, 3, 1, 2).contiguous(), size, "bilinear")
    return chw.permute(0, 2, 3, 1).contiguous()


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


@dataclass(frozen=True)
class VlmSuccessConfig(VideoConfig):
    """Settings of the success question, besides those of `VideoConfig`."""

    ask: Literal["probability", "score"] = "probability"  # from log probabilities, or a grade
    prefixes: Count = 1  # questions per episode, about growing parts; 1: only the last step is paid


class VlmSuccess(VideoReward):
    """Success of an episode, a probability or a score; it is the progress of its last observation.

    `probability` (TOPReward, 2026): the model is asked whether the video completes the task, and
    the log probabilities of the answer's first token give p = P(True) / (P(True) + P(False)). Asked
    about `prefixes` of growing length, p over time is progress. `score` (RoboReward, 2026): a grade
    from 1 (no progress) to 5 (completed) of the whole video, as JSON, scaled to [0, 1]; it needs no
    probabilities.

    Differences from the sources: both answers are normalised instead of P(True) alone; prompts and
    rubric are ours; any model can be asked, not only the one that was trained for it.
    """

    def __init__(self, config: VlmSuccessConfig, spec: Spec, folder: Path) -> None:
        if config.prefixes > config.frames:
            raise ConfigError(
                f"reward.prefixes={config.prefixes} must be at most reward.frames={config.frames}"
            )
        super().__init__(config, spec, folder)
        self.interpolated = config.prefixes > 1

    def ask(self, images: Tensor) -> tuple[Sequence[int], Tensor]:
        last = len(images) - 1
        ends = torch.linspace(0, last, self.config.prefixes + 1).round().long().unique()[1:]
        ask = probability if self.config.ask == "probability" else score
        said = [ask(self.chat, self.goal, images[: end + 1]) for end in ends.tolist()]
        start = [0] if self.interpolated else []
        return [*start, *ends.tolist()], torch.tensor([*(0.0 for _ in start), *said])


def probability(chat: Chat, goal: str, images: Tensor) -> float:
    """The probability that the video completes the task, from the first token of the answer."""
    text = (
        f'These {len(images)} images are a video of a robot, in order. It was told: "{goal}". '
        "Does the video show that this is completed at its end? Answer with one word: True or "
        "False."
    )
    answer = chat.ask([Message("user", text, tuple(images))], top_logprobs=TOP)
    return probability_of_true(answer.logprobs, answer.text)


def probability_of_true(logprobs: Sequence[Mapping[str, float]], text: str) -> float:
    """P(True) / (P(True) + P(False)) of the first token that is not blank. A word that is not among
    its alternatives counts as likely as the least likely one. ChatError if neither is."""
    for tokens in logprobs:
        best = max(tokens, key=lambda token: tokens[token], default="")
        if best.strip():
            break
    else:
        raise ChatError("the answer is blank")
    odds = {"true": 0.0, "false": 0.0}
    for token, value in tokens.items():
        word = token.strip().strip("\"'*`.").lower()
        if word in odds:
            odds[word] += math.exp(value)
    if not any(odds.values()):
        raise ChatError(f'neither True nor False, but "{text[:60]}"')
    least = math.exp(min(tokens.values()))
    true, false = (odds[word] or least for word in ("true", "false"))
    return true / (true + false)


def score(chat: Chat, goal: str, images: Tensor) -> float:
    """The model's grade of the video, from 1 to 5, scaled to [0, 1]."""
    text = (
        f'These {len(images)} images are a video of a robot, in order. It was told: "{goal}". '
        "Grade what it has reached at the end: 1 no progress, 2 a beginning, 3 about half, "
        "4 nearly completed or completed with a flaw, 5 completed."
    )
    answer = chat.ask([Message("user", text, tuple(images))], SCHEMA)
    return (int(answer.data["score"]) - 1) / 4
