"""Evaluation of SimClip on held-out scenes and phrasings, and its model card.

Retrieval and single facts are not sufficient for a reward: whether the score follows true progress
along scripted successful episodes is measured separately, for the ladder and for the plain cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from embodied.datasets.lerobot.video import encode_png
from embodied.nn.statistics import auc, spearman
from embodied.vision.captions import Scenes
from embodied.vision.corpus import Corpus, Plan, blank_images
from embodied.vision.image_text import views_of
from embodied.vision.perturbations import TIES, perturbed
from embodied.vision.simclip import BLANK, SimClip, Towers, save, words_of
from embodied.vision.simclip_card import card_markdown

SAID = 5  # phrasings per fact
STRANGE = (  # true of no image
    "a red bus waits in the rain",
    "quarterly earnings exceeded forecasts",
    "an old woman reads a newspaper",
)
GAP = 3  # white pixels between images


def publish(
    out: Path,
    towers: Towers,
    trained: Sequence[Scenes],
    fresh: Sequence[Scenes],
    tracks: Sequence[Scenes],
    plan: Plan,
    minutes: float,
) -> list[str]:
    """Evaluate `towers` and write weights, card and contact sheet to `out`; returns lines to print.

    `fresh` are scenes of another seed, `tracks` scripted successful episodes.
    """
    card = card_of(trained, plan, minutes)
    model = SimClip(towers, card, "cpu")
    card["worlds"] = {
        few.env: {"pictures": len(some), **evaluate(model, few, way)}
        for some, few, way in zip(trained, fresh, tracks, strict=True)
    }
    save(out, towers, card)
    (out / "simclip.md").write_text(card_markdown(card))
    (out / "simclip.png").write_bytes(encode_png(contact_sheet(model, fresh[:2])))
    return [line for line in card_markdown(card).splitlines() if line.startswith("|")]


def card_of(trained: Sequence[Scenes], plan: Plan, minutes: float) -> dict[str, Any]:
    """What the model must know at inference: vocabulary and ladders."""
    corpus = Corpus(trained)
    ladders = {
        f"{scenes.env}: {ladder.name}": [spread(rung.phrases, SAID) for rung in ladder.rungs]
        for scenes in trained
        for ladder in scenes.words.ladders
    }
    known = {word for phrase in corpus.means for word in words_of(phrase)}
    return {
        "plan": asdict(plan),
        "minutes": round(minutes, 1),
        "ladders": ladders,
        "vocabulary": sorted(known | {"and", "while", "with", "not", *words_of(BLANK)}),
    }


def spread(phrases: Sequence[str], count: int) -> list[str]:
    """`count` of `phrases`, evenly spaced."""
    step = max(len(phrases) // count, 1)
    return list(phrases[::step][:count])


def evaluate(model: SimClip, fresh: Scenes, tracks: Scenes) -> dict[str, Any]:
    """All metrics of one environment."""
    seen = model.images(fresh.pictures)
    worst, facts = fact_auc(model, seen, fresh)
    return {
        **facts,
        "worst": worst,
        **rung_accuracy(model, seen, fresh),
        **retrieval_accuracy(model, seen, fresh),
        **progress_correlation(model, tracks),
        "perturbed": perturbed_correlation(model, tracks),
        "said": sentence_correlation(model, tracks),
    }


def fact_auc(model: SimClip, seen: Tensor, fresh: Scenes) -> tuple[list[str], dict[str, float]]:
    """AUC of every fact that is true in some images and false in others, with training and with
    held-out phrasings; and the worst facts."""
    scores: dict[str, dict[str, float]] = {"auc": {}, "auc_held_out": {}}
    for column, fact in enumerate(fresh.words.facts):
        true = fresh.facts[:, column]
        if not 3 <= int(true.sum()) <= len(true) - 3:
            continue
        for name, phrases in (("auc", fact.phrases), ("auc_held_out", fact.held_out)):
            said = model.texts(spread(phrases, SAID))
            each = [auc(close, true) for close in (seen @ said.T).T]
            scores[name][fact.name] = sum(each) / len(each)
    worst = sorted(scores["auc"].items(), key=lambda item: item[1])[:3]
    means = {name: round(sum(v.values()) / max(len(v), 1), 4) for name, v in scores.items()}
    return [f"{name} ({value:.2f})" for name, value in worst], means


def rung_accuracy(model: SimClip, seen: Tensor, fresh: Scenes) -> dict[str, float]:
    """Accuracy of the most likely rung, and within one rung, over all ladders, in held-out
    phrasings."""
    right, beside, column = [], [], 0
    for ladder in fresh.words.ladders:
        count = len(ladder.rungs)
        rungs = torch.stack(
            [mean_embedding(model, spread(rung.held_out, SAID)) for rung in ladder.rungs]
        )
        true = fresh.facts[:, column : column + count].float().argmax(1)
        off = ((seen @ rungs.T).argmax(1) - true).abs()
        right.append(float((off == 0).float().mean()))
        beside.append(float((off <= 1).float().mean()))
        column += count
    each = {"rung": right, "rung_beside": beside}
    return {name: round(sum(values) / max(len(values), 1), 4) for name, values in each.items()}


def retrieval_accuracy(model: SimClip, seen: Tensor, fresh: Scenes) -> dict[str, float]:
    """How often the nearest of the captions of 100 images (all true facts, held-out phrasings) is
    true of an image; and the chance level."""
    count = min(100, len(seen))
    held = fresh.facts[:count]
    captions = [
        " and ".join(
            fact.held_out[0] for fact, true in zip(fresh.words.facts, row, strict=True) if true
        )
        for row in held.tolist()
    ]
    nearest = (seen[:count] @ model.texts(captions).T).argmax(1)
    same = (held[:, None] == held[None]).all(2)
    right = same[torch.arange(count), nearest].float().mean()
    return {"retrieval": round(float(right), 4), "chance": round(float(same.float().mean()), 4)}


def progress_correlation(model: SimClip, tracks: Scenes) -> dict[str, float]:
    """Spearman's correlation of the ladder's score and of the cosine with true progress, averaged
    over the tracks; the fraction of steps with constant score; the scores of an empty image and of
    initial states."""
    rungs = climbed_rungs(model, tracks)
    seen = model.images(tracks.pictures)
    score = placed(model, seen, rungs)
    flat, starts = [], []
    for track in tracks.track.unique().tolist():
        rows = tracks.track == track
        flat.append(float((score[rows].diff().abs() < 1e-3).float().mean()))
        starts.append(float(score[rows][0]))
    random, views = torch.Generator().manual_seed(0), views_of(tracks.pictures)
    nothing = blank_images(32, tracks.pictures.shape[1], views, random)
    return {
        "ladder": mean(correlations(score, tracks)),
        "cosine": mean(correlations(seen @ rungs[-1], tracks)),
        "flat": mean(flat),
        "start": mean(starts),
        "nothing": mean(placed(model, model.images(nothing), rungs).tolist()),
    }


def climbed(tracks: Scenes) -> int:
    """Which ladder the tracks climb."""
    return [ladder.name for ladder in tracks.words.ladders].index(tracks.moved[0])


def climbed_rungs(model: SimClip, tracks: Scenes) -> Tensor:
    """The embeddings [K, D] of its rungs, the empty image first."""
    ladder = tracks.words.ladders[climbed(tracks)]
    each = [mean_embedding(model, spread(rung.phrases, SAID)) for rung in ladder.rungs]
    return torch.stack([model.texts([BLANK])[0], *each])


def correlations(score: Tensor, tracks: Scenes) -> list[float]:
    """Spearman's correlation of a score [N] with true progress, of each track."""
    each = [tracks.track == track for track in tracks.track.unique().tolist()]
    true = tracks.places[:, climbed(tracks)]
    return [spearman(score[rows], true[rows], undefined=0.0) for rows in each]


def perturbed_correlation(model: SimClip, tracks: Scenes) -> dict[str, list[float]]:
    """Correlation of the ladder's score with progress in changed images, mean and lowest track; and
    of progress itself where steps in which it stands still are put in a random order."""
    random, true = torch.Generator().manual_seed(0), tracks.places[:, climbed(tracks)]
    each = correlations(true + 1e-4 * torch.rand(len(true), generator=random), tracks)
    rungs, found = climbed_rungs(model, tracks), {TIES: [mean(each), round(min(each), 4)]}
    for name, pictures in perturbed(tracks.pictures).items():
        each = correlations(placed(model, model.images(pictures), rungs), tracks)
        found[name] = [mean(each), round(min(each), 4)]
    return found


def sentence_correlation(model: SimClip, tracks: Scenes) -> dict[str, float]:
    """Correlation with progress of the score of the negated goal, by its ladder and by the cosine,
    and the highest cosine of three sentences that are true of no image."""
    seen = model.images(tracks.pictures)
    goal = tracks.words.ladders[climbed(tracks)].rungs[-1].phrases[0]
    denied = goal.replace(" is ", " is not ", 1) if " is " in goal else f"not {goal}"
    away, *strange = (
        mean(correlations(seen @ said, tracks)) for said in model.texts([denied, *STRANGE])
    )
    ladder = model.ladder(denied)
    if ladder is None:
        return {"negated": away, "negated, cosine": away, "unrelated": max(strange)}
    score = placed(model, seen, torch.stack([mean_embedding(model, each) for each in ladder]))
    negated = mean(correlations(score, tracks))
    return {"negated": negated, "negated, cosine": away, "unrelated": max(strange)}


def placed(model: SimClip, seen: Tensor, rungs: Tensor) -> Tensor:
    """Expected position of each image on a ladder, in [0, 1]."""
    return (model.scale * seen @ rungs.T).softmax(1) @ torch.linspace(0, 1, len(rungs))


def mean_embedding(model: SimClip, sentences: list[str]) -> Tensor:
    return functional.normalize(model.texts(sentences).mean(0), dim=0)


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / max(len(values), 1), 4)


def contact_sheet(model: SimClip, envs: Sequence[Scenes], count: int = 6) -> Tensor:
    """Per environment, the images with the highest (first row) and lowest (second row) score of the
    best rung, uint8 [h, w, 3]."""
    rows = []
    for scenes in envs:
        ladder = next(each for each in scenes.words.ladders if each.name in scenes.moved)
        rungs = [mean_embedding(model, spread(rung.phrases, SAID)) for rung in ladder.rungs]
        score = placed(model, model.images(scenes.pictures), torch.stack(rungs))
        order = score.argsort(descending=True)
        # Neighbours in rank look alike: every fourth image.
        rows += [
            scenes.pictures[order[: 4 * count : 4]],
            scenes.pictures[order.flip(0)[: 4 * count : 4]],
        ]
    edged = [functional.pad(row, (0, 0, 0, GAP, 0, GAP), value=255) for row in rows]
    lines = [torch.cat(list(row), 1) for row in edged]
    widest = max(line.shape[1] for line in lines)
    return torch.cat([functional.pad(x, (0, 0, 0, widest - x.shape[1]), value=255) for x in lines])
