"""Success of an episode, asked of a vision-language model (TOPReward, RoboReward)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from embodied.core.bounds import Count
from embodied.core.build import ConfigError
from embodied.core.spec import Spec
from embodied.llm.chat import Chat, ChatError, Message, object_schema
from embodied.rewards.vision_language.video_reward import VideoConfig, VideoReward

TOP = 20  # alternatives of a token, as many as servers usually report
SCHEMA = object_schema({"score": {"enum": [1, 2, 3, 4, 5]}})


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
    its alternatives counts as likely as the least likely one. ChatError if neither word is, or if
    the alternatives of one are all that is listed."""
    for tokens in logprobs:
        best = max(tokens, key=lambda token: tokens[token], default="")
        if best.strip():
            break
    else:
        raise ChatError("the answer is blank")
    odds = {"true": 0.0, "false": 0.0}
    least = math.inf
    for token, value in tokens.items():
        word = token.strip().strip("\"'*`.").lower()
        if word in odds:
            odds[word] += math.exp(value)
        else:
            least = min(least, math.exp(value))
    found = sum(odds.values())
    if not found:
        raise ChatError(f'neither True nor False, but "{text[:60]}"')
    if min(odds.values()) == 0:
        if least >= found:
            raise ChatError(f'only "{best[:60]}" is listed: the other word may be as likely')
        odds = {word: value or least for word, value in odds.items()}
    return odds["true"] / sum(odds.values())


def score(chat: Chat, goal: str, images: Tensor) -> float:
    """The model's grade of the video, from 1 to 5, scaled to [0, 1]."""
    text = (
        f'These {len(images)} images are a video of a robot, in order. It was told: "{goal}". '
        "Grade what it has reached at the end: 1 no progress, 2 a beginning, 3 about half, "
        "4 nearly completed or completed with a flaw, 5 completed."
    )
    answer = chat.ask([Message("user", text, tuple(images))], SCHEMA)
    return (int(answer.data["score"]) - 1) / 4
