"""Evaluation of SimClip on held-out scenes and phrasings, and its model card.

Retrieval and single facts are not sufficient for a reward: whether the score follows true progress
along scripted successful episodes is measured separately, for the ladder and for the plain cosine.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from benchmarks.simclip.captions import Scenes
from benchmarks.simclip.corpus import Corpus, Plan, blank_images
from embodied.datasets.lerobot.video import encode_png
from embodied.nn.statistics import auc, spearman
from embodied.vision.image_text import views_of
from embodied.vision.simclip import BLANK, SimClip, Towers, words_of

SAID = 5  # phrasings per fact
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
        "vocabulary": sorted(known | {"and", "while", "with", *words_of(BLANK)}),
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
    names = [ladder.name for ladder in tracks.words.ladders]
    column = names.index(tracks.moved[0])
    ladder = tracks.words.ladders[column]
    rungs = torch.stack(
        [
            model.texts([BLANK])[0],
            *(mean_embedding(model, spread(r.phrases, SAID)) for r in ladder.rungs),
        ]
    )
    seen = model.images(tracks.pictures)
    score = placed(model, seen, rungs)
    cosine = seen @ rungs[-1]
    ladders, cosines, flat, starts = [], [], [], []
    for track in tracks.track.unique().tolist():
        rows = tracks.track == track
        true = tracks.places[rows, column]
        ladders.append(spearman(score[rows], true, undefined=0.0))
        cosines.append(spearman(cosine[rows], true, undefined=0.0))
        flat.append(float((score[rows].diff().abs() < 1e-3).float().mean()))
        starts.append(float(score[rows][0]))
    random, views = torch.Generator().manual_seed(0), views_of(tracks.pictures)
    nothing = blank_images(32, tracks.pictures.shape[1], views, random)
    return {
        "ladder": mean(ladders),
        "cosine": mean(cosines),
        "flat": mean(flat),
        "start": mean(starts),
        "nothing": mean(placed(model, model.images(nothing), rungs).tolist()),
    }


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


def card_markdown(card: dict[str, Any]) -> str:
    """The model card as Markdown."""
    plan, columns = card["plan"], ("auc", "auc_held_out", "rung", "rung_beside", "retrieval")
    lines = [
        "# simclip",
        "",
        "A small image-text dual encoder, distilled from the states of our simulators. It is valid",
        "for the environments and sentences below, not for language in general. Rewards that use",
        "it show that the method works, not that a model understands images.",
        "",
        f"Trained for {plan['steps']} steps on batches of {plan['batch']} images with captions, "
        f"and {plan['polish']} steps",
        f"of the image head alone (seed {plan['seed']}). The last session took {card['minutes']} "
        "minutes, rendering",
        "included. Images were augmented in brightness, colour, noise and resolution.",
        "Evaluated on scenes of another seed; one in seven phrasings of each fact was held out.",
        "",
        "| environment | images | fact AUC | AUC, held-out phrasings | rung accuracy | within one "
        "rung | retrieval (chance) | ladder ~ progress | cosine ~ progress | constant steps | "
        "empty / initial |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for env, row in card["worlds"].items():
        cells = [f"{row[name]:.2f}" for name in columns[:-1]]
        cells += [f"{row['retrieval']:.2f} ({row['chance']:.2f})"]
        cells += [f"{row['ladder']:.2f}", f"{row['cosine']:.2f}", f"{row['flat']:.0%}"]
        cells += [f"{row['nothing']:.2f} / {row['start']:.2f}"]
        lines.append(f"| {env} | {row['pictures']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "`ladder ~ progress`: Spearman correlation between the expected position on a ladder of",
        "captions and the true one, along scripted successful episodes; `cosine ~ progress`: the",
        "same for the cosine similarity to the last caption. `constant steps`: steps in which the",
        "ladder score changes by less than 0.001. `empty / initial`: ladder score of an empty",
        "image and of initial states.",
        "",
        "## Limitations",
        "",
        *[
            f"- {env}: the facts with the lowest AUC are {', '.join(row['worst'])}."
            for env, row in card["worlds"].items()
        ],
        "- Depth along the viewing direction in a single view: an object in front of or behind",
        "  another one looks close to it unless one hides the other. The FR3 images show the front",
        "  and wrist cameras side by side (env.portraits=[front,wrist]), a quarter of them the",
        "  front camera alone.",
        "- Anything without captions: speeds, other objects, robots and environments.",
        "  A sentence with mostly unknown words has no ladder; its score is the cosine similarity,",
        "  which is meaningless then.",
        '- Words outside of the training captions, negations ("not touching" is read as',
        '  "touching"), numbers.',
        "",
    ]
    return "\n".join(lines)


def save(folder: Path, towers: Towers, card: dict[str, Any]) -> None:
    """Write weights (half precision) and card; atomic."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.detach().half().contiguous().cpu() for k, v in towers.state_dict().items()}
    digest = 0
    for key in sorted(state):
        digest = zlib.crc32(state[key].reshape(-1).view(torch.uint8).numpy().tobytes(), digest)
    card = {"shape": asdict(towers.shape), "weights": f"{digest:08x}", **card}
    part = folder / "simclip.safetensors.part"
    save_file(state, part)
    part.rename(folder / "simclip.safetensors")
    part = folder / "simclip.json.part"
    part.write_text(json.dumps(card, indent=1) + "\n")
    part.rename(folder / "simclip.json")
