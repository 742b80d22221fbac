"""Annotation (reward=annotate): training speed, queries saved, agreement with the labeller.

The labeller is simulated: rules over words with a latency of 50 ms per call, so the software around
the labeller is measured.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import main
from benchmarks.measure import Block, Comparison, alone, compare, table, write_json
from embodied.compose import compose
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.tensors import nest
from embodied.nn.statistics import spearman
from embodied.rewards.language.annotate import Annotate, CaptionLabeller, Classification
from embodied.rewards.language.rule_reader import Config as Rules
from embodied.rewards.language.rule_reader import RuleReader
from embodied.rewards.wrappers.added_observations import (
    CAPTION,
    CaptionVocabulary,
    with_event_captions,
)
from embodied.training.components import RunComponents
from embodied.training.config import read_config
from embodied.training.trainer import Every, Trainer

EXPERIMENT = "minigrid_unlock_annotate"
LATENCY = 0.05
HELPFUL = ("unlocked", "picked up", "opened .* door")
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
CAPTIONS = (
    *("you picked up the {} key", "you picked up the {} box", "you picked up the {} ball"),
    *("you unlocked the {} door", "you opened the {} door", "you closed the {} door"),
    *("you put down the {} key", "you put down the {} box", "you put down the {} ball"),
    *("you face the {} key", "you face the closed {} door", "you face the locked {} door"),
    *("you face the {} box", "you stepped into the doorway of the {} door"),
)


def run(out: Path | str = "bench", repeats: int = 5) -> list[Comparison]:
    """Measure all settings on one thread, print the table, write `out/annotate.json`; two
    minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [
            beside(repeats),
            synchronous(),
            saved("events", 1),
            saved("events", 4),
            distilled(repeats),
        ]
    finally:
        torch.set_num_threads(threads)
    table(rows, "annotation with a simulated labeller, 50 ms per call, one thread")
    write_json(Path(out), "annotate", rows)
    return rows


def beside(repeats: int) -> Comparison:
    """PPO with the annotator in the background against the same PPO without a learned reward."""
    with tempfile.TemporaryDirectory() as folder:
        sides = training(Path(folder), []), training(Path(folder), ["reward=null"])
        spent: tuple[list[float], list[float]] = ([], [])
        ours, theirs = (on_clock(*side) for side in zip(sides, spent, strict=True))
        name = "PPO on UnlockPickup x64, annotated, against no annotation"
        row = compare(ours, theirs, 3 * repeats, name, target=0.9)  # other processes add noise
    mine, free = (float(np.median(seconds[1:])) for seconds in spent)
    return replace(row, notes={"processor_time_ratio": free / mine})


def on_clock(block: Block, seconds: list[float]) -> Block:
    """`block`, with the process time of each run in `seconds`: less affected by other processes."""

    def timed() -> int:
        began = time.process_time()
        items = block()
        seconds.append(time.process_time() - began)
        return items

    return timed


def training(folder: Path, words: list[str]) -> Block:
    """One batch of steps and its update, by the training loop of the experiment."""
    words = [f"experiment={EXPERIMENT}", f"out={folder}", *words]
    if "reward=null" not in words:
        words.append(f"reward.labeller.latency={LATENCY}")
    config = read_config(compose("train", words).node | {"out": str(folder), "name": "bench"})
    assert config.env is not None
    torch.manual_seed(0)
    loop = RunComponents(replace(config, device="cpu")).loop
    batch = int(config.env["num_envs"]) * int(config.learner["horizon"])

    def block() -> int:
        keeper = Trainer(NullLog(), batch, Every(0, 0, 0), print, print)  # pyright: ignore[reportArgumentType]
        loop.run(keeper)
        return keeper.step

    return block


class NullLog:
    """A log that stores nothing."""

    def advance(self, step: int) -> None:
        pass

    def write(self, step: int, values: dict[str, float]) -> None:
        pass


def synchronous() -> Comparison:
    """The same loop with one blocking query per step."""
    with tempfile.TemporaryDirectory() as folder:
        free = alone(training(Path(folder), ["reward=null"]), 3)
    env, _ = world()
    judge = CaptionLabeller(RuleReader(Rules(HELPFUL, latency=LATENCY)), "")
    captions = CaptionVocabulary()
    env = with_event_captions(env, captions)
    env.reset(0)

    def block() -> int:
        step = env.step(torch.randint(0, 7, (env.num_envs,)))
        for number in step.next_obs[CAPTION].tolist():
            judge.label([(captions.texts[number] or "nothing happened",)])
        return env.num_envs

    slow = alone(block, 1)
    name = "synchronous, one call per step, against no annotation"
    return Comparison(slow.ours_rates, (free.ours_rate,), name)


def world() -> tuple[VecEnv, dict[str, Any]]:
    """The experiment's environment and its reward configuration."""
    node = compose("train", [f"experiment={EXPERIMENT}"]).node
    return build(node["env"], VecEnv), node["reward"]


def saved(what: str, stride: int, steps: int = 600) -> Comparison:
    """Captioned steps per query, and how well the learned rewards rank all of them, compared with
    one label for each step."""
    env, node = world()
    with tempfile.TemporaryDirectory() as folder:
        reward = build(
            {**node, "stride": stride, "synchronous": True, "labeller": rules()},
            Annotate,
            spec=env.spec,
            folder=Path(folder),
            seed=0,
            device=torch.device("cpu"),
        )
        numbers = experience(reward, reward.augment_env(env), steps)
    told_of = numbers[numbers > 0]
    judge, texts = RuleReader(Rules(HELPFUL)), reward.captions.texts
    full = np.array([float(judge.worth(text) > 0) for text in texts])
    rank = spearman(reward.caption_scores(torch.from_numpy(numbers)).numpy(), full[numbers])
    asked = reward.pool.asked
    return Comparison(
        (len(told_of) / asked,),
        (1.0,),
        f"{what} of {len(numbers):,} random steps, stride {stride}: rank correlation {rank:.3f}",
        "captioned steps per query",
        5.0,
        {"rank_correlation": rank, "asked": asked, "told": len(told_of), "captions": len(texts)},
    )


def rules() -> dict[str, Any]:
    """The configuration of a labeller without errors and without latency."""
    target = "embodied.rewards.language.rule_reader.RuleReader"
    return {"_target_": target, "helpful": list(HELPFUL)}


def experience(reward: Annotate, env: VecEnv, steps: int) -> np.ndarray:
    """Caption ids of random steps, observed by the reward as in training."""
    env.reset(0)
    generator, every = torch.Generator().manual_seed(0), torch.arange(env.num_envs)
    seen = []
    for count in range(steps):
        step = env.step(torch.randint(0, 7, (env.num_envs,), generator=generator))
        reward.observe_step({**nest(step.next_obs, "next_obs"), "reward": step.reward}, every, step)
        seen.append(step.next_obs[CAPTION].numpy())
        if count % 64 == 63:
            reward.set_step(count)
    reward.set_step(steps)
    return np.concatenate(seen)


def distilled(repeats: int) -> Comparison:
    """Captions per second of the distilled network against its labeller, one caption per call;
    agreement on pairs of captions in colours that were not in its training data."""
    model, agreed, held_out = taught(300)
    reader = CaptionLabeller(RuleReader(Rules(HELPFUL, latency=LATENCY)), "")

    def ours() -> int:
        for _ in range(20):
            model(held_out)
        return 20 * len(held_out)

    def theirs() -> int:
        for text in held_out[:6]:
            reader.label([(text,)])
        return 6

    name = f"captions labelled by the network; pairwise agreement {agreed:.2f} on unseen colours"
    row = compare(ours, theirs, repeats, name, "captions", 50.0)
    return replace(row, notes={"agreement": agreed, "held_out": len(held_out)})


def taught(steps: int) -> tuple[Classification, float, list[str]]:
    """Train a network on captions of four colours with labels of a 10% error rate; returns its
    agreement with an error-free labeller on the other two colours, and their captions."""
    known = [said.format(colour) for said in CAPTIONS for colour in COLOURS[:4]]
    held_out = [said.format(colour) for said in CAPTIONS for colour in COLOURS[4:]]
    erring = CaptionLabeller(RuleReader(Rules(HELPFUL, error=0.1)), "")
    labels = [(one.question, one.value) for one in erring.label([(text,) for text in known])]
    questions, values = zip(*[(q, v) for q, v in labels if v is not None], strict=True)
    model = Classification(steps, lr=2e-3, batch=32, threshold=0.5, seed=0)
    model.learn(questions, values)
    return model, agreement(model, RuleReader(Rules(HELPFUL)).worth, held_out), held_out


def agreement(model: Classification, worth: Callable[[str], int], captions: list[str]) -> float:
    """The share of caption pairs, one helpful and one not, that the network ranks correctly."""
    score = model.scores(captions)
    helps = torch.tensor([worth(caption) > 0 for caption in captions])
    return float((score[helps][:, None] > score[~helps][None]).float().mean())


if __name__ == "__main__":
    main(run)
