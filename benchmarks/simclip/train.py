"""Contrastive training of SimClip's image and text towers on scenes with known facts.

Sentence j is positive for image i iff all facts that it states hold in i, with a pairwise sigmoid
loss (Zhai et al., 2023): most in-batch "negatives" would be true captions here. In addition, the
rungs of a ladder, as logits, must give the image's position between them:

    L = mean_i sum_j softplus(-z_ij (e^t <x_i, y_j> + b)) + c CE(softmax_k e^t <x_i, y_k>, place_i)

Anchors, one vector per fact, align the towers: images are attracted to the anchors of their rungs,
sentences to those of the facts that they state (cross-entropies over anchors). Without anchors
training makes hardly any progress. They are discarded afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.simclip.captions import Scenes
from benchmarks.simclip.corpus import Batch, Corpus, Plan, drop_views, rungs_of, sample_batch
from embodied.vision.simclip import ImageTower, Shape, Towers


def contrastive_loss(
    towers: Towers, batch: Batch, order: float, anchors: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The loss above, and its parts; `anchors` [F, D]."""
    device = towers.t.device
    seen = functional.normalize(towers.look.of(batch.moments.to(device)), dim=1)
    ladders = [text for each in batch.rungs for text in each]
    said = towers.sentences([*batch.captions, *ladders])
    logits = logits_of(towers, seen, said[: len(batch.captions)])
    sign = 2.0 * batch.true.to(device) - 1
    pair = functional.softplus(-sign * logits).sum(1).mean()
    some = torch.cat([seen[: batch.own], seen[len(seen) - batch.blank :]])
    marks, scale = functional.normalize(anchors, dim=1), towers.t.exp()
    named = -(batch.stated.to(device) * (scale * said @ marks.T).log_softmax(1)).sum(1).mean()
    ranked, led, at = pair.new_zeros(()), pair.new_zeros(()), len(batch.captions)
    for rungs, numbers, places in zip(batch.rungs, batch.ranks, batch.places.T, strict=True):
        nothing = functional.one_hot(torch.zeros(batch.blank, dtype=torch.int64), len(rungs))
        wanted = torch.cat([rung_weights(places, len(rungs)), nothing]).to(device)
        ranked = ranked + functional.cross_entropy(
            scale * some @ said[at : at + len(rungs)].T, wanted
        )
        led = led + functional.cross_entropy(scale * some @ marks[numbers].T, wanted)
        at += len(rungs)
    count = max(len(batch.rungs), 1)
    total = pair + order * (ranked + led) / count + order * named
    metrics = {"pairs": pair, "order": ranked / count, "led": led / count, "named": named}
    return total, {name: value.item() for name, value in metrics.items()}


def rung_weights(places: Tensor, count: int) -> Tensor:
    """Weights [n, count] of the rungs around each position in `places` [n]; rung 0 is the empty
    image, and position 0 is rung 1."""
    places = places.clamp(0, count - 2)
    low = places.floor().long().clamp(max=max(count - 3, 0))
    share = (places - low)[:, None]
    lower, upper = (functional.one_hot(low + shift, count) for shift in (1, 2))
    return (1 - share) * lower + share * upper


def train(
    envs: Sequence[Scenes],
    plan: Plan,
    shape: Shape,
    kept: Path,
    told: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    device: torch.device | str = "cpu",
) -> Towers:
    """Train for `plan.steps` steps. Resumes from the checkpoint `kept` if it exists, and writes it
    every `plan.save_every` steps."""
    torch.manual_seed(plan.seed)
    towers, corpus = Towers(shape).to(device), Corpus(envs)
    anchors = torch.nn.Parameter(torch.randn(corpus.count, shape.size, device=device))
    learned = [*towers.parameters(), anchors]
    optimizer = torch.optim.AdamW(learned, plan.rate, weight_decay=plan.decay)
    corpus.look(towers, plan, kept.parent)
    some = torch.cat([each.flatten(0, 1)[::5] for each in corpus.moments])
    normalise(towers.look, some.float())
    begin = 0
    if kept.exists():
        state: dict[str, Any] = torch.load(kept, weights_only=True, map_location=device)
        towers.load_state_dict(state["towers"])
        anchors.data.copy_(state["anchors"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    for step in range(begin, plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * lr_factor(step, plan, plan.steps)
        loss, metrics = contrastive_loss(
            towers, sample_batch(corpus, plan, step), plan.order, anchors
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 5.0)
        optimizer.step()
        told(step + 1, metrics)
        if (step + 1) % plan.save_every == 0 or step + 1 == plan.steps:
            save_checkpoint(kept, towers, anchors, optimizer, step + 1)
    train_image_head(towers, corpus, plan, told)
    return towers.eval()


def train_image_head(
    towers: Towers, corpus: Corpus, plan: Plan, told: Callable[[int, dict[str, float]], None]
) -> None:
    """Train the image head against fixed sentence embeddings, which costs a tenth per step."""
    device = towers.t.device
    with torch.no_grad():
        said = [towers.sentences(phrases) for phrases in corpus.phrases]
    optimizer = torch.optim.AdamW(towers.look.head.parameters(), plan.rate, weight_decay=0.1)
    for step in range(plan.polish):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * lr_factor(step, plan, plan.polish)
        random = torch.Generator().manual_seed(plan.seed * 1_000_003 + 500_000 + step)
        picks = [int(torch.randint(len(each), (1,), generator=random)) for each in said]
        marks = torch.stack([each[pick] for each, pick in zip(said, picks, strict=True)])
        loss, metrics = image_head_loss(towers, corpus, plan, marks.to(device), random)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told(plan.steps + step + 1, metrics)


def image_head_loss(
    towers: Towers, corpus: Corpus, plan: Plan, marks: Tensor, random: torch.Generator
) -> tuple[Tensor, dict[str, float]]:
    """Loss of a batch of one environment's images, and empty ones, against one sentence `marks` [F,
    D] per fact."""
    sizes = torch.tensor([float(len(scenes)) for scenes in corpus.envs])
    env = int(torch.multinomial(sizes, 1, generator=random))
    index = torch.randint(len(corpus.envs[env]), (plan.batch,), generator=random)
    variant = torch.randint(plan.variants, (plan.batch,), generator=random)
    none = torch.randint(len(corpus.nothing), (plan.batch // 20,), generator=random)
    looks = torch.cat([corpus.moments[env][variant, index], corpus.nothing[none]]).float()
    looks = drop_views(looks, corpus.single, random).to(marks.device)
    seen = functional.normalize(towers.look.of(looks), dim=1)
    facts = torch.zeros(len(seen), corpus.count)
    facts[: plan.batch] = corpus.facts(env, index).float()
    facts[plan.batch :, -1] = 1
    sign = 2 * facts.to(marks.device) - 1
    pair = functional.softplus(-sign * logits_of(towers, seen, marks)).sum(1).mean()
    ranked, places = pair.new_zeros(()), corpus.envs[env].places[index]
    for numbers, place in zip(rungs_of(corpus, env), places.T, strict=True):
        close = towers.t.exp() * seen @ marks[[corpus.count - 1, *numbers]].T
        empty = functional.one_hot(torch.zeros(len(none), dtype=torch.int64), close.shape[1])
        wanted = torch.cat([rung_weights(place, close.shape[1]), empty]).to(marks.device)
        ranked = ranked + functional.cross_entropy(close, wanted)
    ranked = ranked / max(places.shape[1], 1)
    return pair + plan.order * ranked, {"pairs": pair.item(), "order": ranked.item()}


def lr_factor(step: int, plan: Plan, steps: int) -> float:
    """Learning-rate factor: linear warm-up, then cosine decay."""
    if step < plan.warm:
        return (step + 1) / plan.warm
    done = (step - plan.warm) / max(steps - plan.warm, 1)
    return 0.5 * (1 + math.cos(math.pi * done))


def save_checkpoint(
    path: Path, towers: Towers, anchors: Tensor, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Write everything that a resume needs; atomic."""
    part, state = path.with_suffix(".part"), {"towers": towers.state_dict(), "step": step}
    torch.save({**state, "anchors": anchors.data, "optimizer": optimizer.state_dict()}, part)
    part.rename(path)


def logits_of(towers: Towers, pictures: Tensor, sentences: Tensor) -> Tensor:
    """Logits [N, M] of image embeddings with sentence embeddings."""
    return towers.t.exp() * pictures @ sentences.T + towers.b


def normalise(tower: ImageTower, moments: Tensor) -> None:
    """Set the normalisation from the fixed features [N, F] of many images."""
    there = ~moments.isnan()
    count, known = there.sum(0).clamp(min=2), moments.nan_to_num(0.0)
    mean = known.sum(0) / count
    square = ((known - mean) * there).square().sum(0) / (count - 1)
    tower.mean.copy_(mean)
    tower.deviation.copy_(square.sqrt().clamp(min=0.02))
