"""Contrast: train picture and sentence towers on scenes whose facts are known.

Sentence j is positive for picture i iff every fact that it states holds in i, each pair judged by
itself (sigmoid loss, Zhai et al., 2023): in-batch "negatives" are mostly true captions here. And
the rungs of a ladder, as logits over themselves, have to give the picture's place between them:

    L = mean_i sum_j softplus(-z_ij (e^t <x_i, y_j> + b)) + c CE(softmax_k e^t <x_i, y_k>, place_i)

Both towers are led to one another by anchors, one vector a fact: a picture is to be near the rungs
it stands on, a sentence near the facts that it states (cross-entropies over anchors). Without them
each tower waits for the other. The anchors are not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from embodied.foundation.captions import Scenes
from embodied.foundation.simclip import BLANK, Shape, Towers, prepared, words_of

BLANKS = (BLANK, "an empty picture", "no scene in view", "the picture is empty", "nothing in view")
STRAYS = words_of(
    "red bus street rain dog cat piano sings river mountain bread window old woman child reads "
    "newspaper garden tree flower boat sails storm horse kitchen plate soup guitar plays dances "
    "moon night train station waits umbrella book letter winter snow football crowd sleeps chair"
)
LINKS = (" and ", ", ", " while ", "; ", " with ")


@dataclass(frozen=True)
class Plan:
    """`steps` of `batch` pictures; AdamW with warm-up and a cosine;
    then `polish` steps of pictures alone; `order` is c;
    `variants` of every picture are drawn from: itself, and in other lights."""

    steps: int = 2500
    batch: int = 160
    rate: float = 2e-3
    warm: int = 50
    decay: float = 0.01
    order: float = 4.0
    seed: int = 0
    variants: int = 2
    polish: int = 8000
    save_every: int = 200


class Corpus:
    """All worlds' scenes with one numbering of facts, and every phrasing's facts."""

    def __init__(self, worlds: Sequence[Scenes], held_out: bool = False) -> None:
        self.worlds = list(worlds)
        facts = [fact for scenes in worlds for fact in scenes.words.facts]
        self.count = len(facts) + 1  # the last one: there is nothing to be seen
        self.first = [0]
        for scenes in worlds:
            self.first.append(self.first[-1] + len(scenes.words.facts))
        said = [fact.held_out if held_out else fact.phrases for fact in facts]
        self.phrases: list[tuple[str, ...]] = [*said, BLANKS]
        self.means: dict[str, set[int]] = {}
        for number, each in enumerate(self.phrases):
            for phrase in each:
                self.means.setdefault(phrase, set()).add(number)
        # A rare fact is as worth telling as a common one.
        self.rare = [1 / scenes.facts.float().mean(0).clamp(min=0.01) for scenes in worlds]

    def look(self, towers: Towers, plan: Plan, folder: Path) -> None:
        """Reduce every picture, in `plan.variants`, to what of it is not learned: `moments` of each
        world [V, N, F] and of `nothing` [n, F]; read from `folder` where they are there."""
        random, self.single = torch.Generator().manual_seed(plan.seed), towers.look.each.size
        empty = blanks(300, towers.shape.side, towers.shape.views, random)
        self.nothing = moments(towers, empty, 0, random)
        self.moments: list[Tensor] = []
        for scenes in self.worlds:
            random.manual_seed(plan.seed)
            sort = f"{len(scenes)}-{plan.variants}-{towers.shape.views}"
            path = folder / f"moments-{scenes.world}-{sort}.safetensors"
            if not path.exists():
                each = [moments(towers, scenes.pictures, v, random) for v in range(plan.variants)]
                save_file({"moments": torch.stack(each)}, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
            self.moments.append(load_file(path)["moments"])

    def facts(self, world: int, index: Tensor) -> Tensor:
        """Facts [n, count] (bool) of pictures `index` [n]."""
        known = torch.zeros(len(index), self.count, dtype=torch.bool)
        known[:, self.first[world] : self.first[world + 1]] = self.worlds[world].facts[index]
        return known

    def told(self, world: int, index: Tensor, random: torch.Generator) -> list[list[str]]:
        """A caption for every picture: one to three phrases that are true of it."""
        weights = self.worlds[world].facts[index] * self.rare[world]
        most = int((weights > 0).sum(1).min())
        chosen = torch.multinomial(weights, min(3, most), generator=random)
        counts = torch.randint(1, chosen.shape[1] + 1, (len(index),), generator=random)
        return [
            [self.phrase(self.first[world] + number, random) for number in row[:count]]
            for row, count in zip(chosen.tolist(), counts.tolist(), strict=True)
        ]

    def phrase(self, fact: int, random: torch.Generator) -> str:
        """One of a fact's phrasings."""
        each = self.phrases[fact]
        return each[int(torch.randint(len(each), (1,), generator=random))]

    def shares(self, sentences: Sequence[Sequence[str]]) -> Tensor:
        """Of which facts each sentence speaks [M, count], rows that sum to one (or to nothing)."""
        shares = torch.zeros(len(sentences), self.count)
        for row, sentence in enumerate(sentences):
            for phrase in sentence:
                for number in self.means[phrase]:
                    shares[row, number] += 1 / len(self.means[phrase]) / len(sentence)
        return shares

    def hold(self, captions: Sequence[Sequence[str]], facts: Tensor) -> Tensor:
        """Which captions [M] are true of pictures with `facts` [n, count]: [n, M] (bool). A phrase
        that means several facts (in several worlds) is true where one of them is."""
        true = torch.ones(len(facts), len(captions), dtype=torch.bool)
        for column, caption in enumerate(captions):
            for phrase in caption:
                true[:, column] &= facts[:, sorted(self.means.get(phrase, ()))].any(1)
        return true


@dataclass(slots=True)
class Batch:
    """`moments` [n, F] of pictures, `captions` with who they are `true` of [n, M]; `rungs`:
    sentences of each ladder of the first `own` pictures' world, worst first, and their `places`
    [own, L]; the last `blank` pictures are of nothing. `stated` [M + rungs, F]: which facts each
    sentence states, as shares; `ranks`: the numbers of the rungs' facts, nothing's first."""

    moments: Tensor
    captions: list[str]
    true: Tensor
    rungs: list[list[str]]
    places: Tensor
    own: int
    blank: int
    stated: Tensor
    ranks: list[list[int]]


def drawn(corpus: Corpus, plan: Plan, step: int) -> Batch:
    """The batch of one step: three quarters from one world, so that its captions have to be told
    apart; a few pictures of nothing, a few sentences about nothing."""
    random = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    sizes = torch.tensor([float(len(scenes)) for scenes in corpus.worlds])
    main = int(torch.multinomial(sizes, 1, generator=random))
    others = torch.multinomial(sizes, 3, replacement=True, generator=random).tolist()
    own, rest, blank = 3 * plan.batch // 4, plan.batch // 16, plan.batch // 16
    seen, facts, captions = [], [], []
    for world, count in [(main, own), *((other, rest) for other in others)]:
        index = torch.randint(len(corpus.worlds[world]), (count,), generator=random)
        variant = torch.randint(plan.variants, (count,), generator=random)
        seen.append(corpus.moments[world][variant, index])
        facts.append(corpus.facts(world, index))
        captions += corpus.told(world, index[: max(count // 3, 1)], random)
        if len(seen) == 1:
            places = corpus.worlds[world].places[index]
    seen.append(corpus.nothing[torch.randint(len(corpus.nothing), (blank,), generator=random)])
    facts.append(functional.one_hot(torch.full((blank,), corpus.count - 1), corpus.count).bool())
    captions.append([corpus.phrase(corpus.count - 1, random)])
    rungs = [
        [corpus.phrase(corpus.count - 1, random)]
        + [corpus.phrase(number, random) for number in numbers]
        for numbers in rungs_of(corpus, main)
    ]
    captions += [[text] for each in rungs for text in each[1:]]
    known = torch.cat(facts)
    true = corpus.hold(captions, known)
    numbers = [[corpus.count - 1, *each] for each in rungs_of(corpus, main)]
    strays = [stray(random) for _ in range(4)]
    texts = [joined(caption, random) for caption in captions] + strays
    sentences = [*captions, *([] for _ in strays), *([text] for each in rungs for text in each)]
    true = torch.cat([true, torch.zeros(len(true), len(strays), dtype=torch.bool)], 1)
    return Batch(
        glimpsed(torch.cat(seen).float(), corpus.single, random),
        texts,
        true,
        rungs,
        places,
        own,
        blank,
        corpus.shares(sentences),
        numbers,
    )


def rungs_of(corpus: Corpus, world: int) -> list[list[int]]:
    """The numbers of the facts of each of a world's ladders."""
    found, number = [], corpus.first[world]
    for ladder in corpus.worlds[world].words.ladders:
        found.append(list(range(number, number + len(ladder.rungs))))
        number += len(ladder.rungs)
    return found


def joined(phrases: Sequence[str], random: torch.Generator) -> str:
    """Phrases as one sentence."""
    link = LINKS[int(torch.randint(len(LINKS), (1,), generator=random))]
    return link.join(phrases)


def glimpsed(moments: Tensor, single: int, random: torch.Generator) -> Tensor:
    """Every fourth picture [N, F] without the views after its first, which has `single` numbers."""
    moments[torch.rand(len(moments), generator=random) < 0.25, single:] = torch.nan
    return moments


def stray(random: torch.Generator) -> str:
    """A sentence that is true of no scene."""
    count = int(torch.randint(3, 9, (1,), generator=random))
    picks = torch.randint(len(STRAYS), (count,), generator=random)
    return " ".join(STRAYS[pick] for pick in picks.tolist())


def blanks(count: int, side: int, views: int, random: torch.Generator) -> Tensor:
    """Pictures of nothing: one colour, darkness, noise, uint8 [count, side, views side, 3]."""
    colour = torch.randint(256, (count, 1, 1, 3), generator=random)
    colour[::3] = 0
    noise = torch.randint(-60, 61, (count, side, views * side, 3), generator=random)
    noise[: count // 2] //= 20
    return (colour + noise).clamp(0, 255).to(torch.uint8)


@torch.no_grad()
def moments(towers: Towers, pictures: Tensor, variant: int, random: torch.Generator) -> Tensor:
    """What is not learned of pictures, [N, F] in half precision; those of variant 0 as they are."""
    device = towers.t.device
    parts = [
        towers.look.moments(
            prepared(varied(p, random) if variant else p, towers.shape.side).to(device)
        )
        for p in pictures.split(200)
    ]
    return torch.cat(parts).half().cpu()


def varied(pictures: Tensor, random: torch.Generator) -> Tensor:
    """Another light, other colours, some noise, and for every fifth a coarser picture."""
    count, (side, width) = len(pictures), pictures.shape[1:3]
    gain = 0.8 + 0.4 * torch.rand(count, 1, 1, 1, generator=random)
    tint = 0.92 + 0.16 * torch.rand(count, 1, 1, 3, generator=random)
    shift = 24 * torch.rand(count, 1, 1, 1, generator=random) - 12
    # One grain for all, each with its own strength: drawing one for each costs more than a step.
    grain = torch.randn(1, *pictures.shape[1:], generator=random)
    strength = 8 * torch.rand(count, 1, 1, 1, generator=random) - 4
    changed = pictures.float() * (gain * tint) + (shift + strength * grain)
    coarse = changed[::5].permute(0, 3, 1, 2)
    coarse = functional.interpolate(coarse, (2 * side // 3, 2 * width // 3), mode="area")
    coarse = functional.interpolate(coarse, (side, width), mode="bilinear")
    changed[::5] = coarse.permute(0, 2, 3, 1)
    return changed.clamp(0, 255).to(torch.uint8)


def loss_of(
    towers: Towers, batch: Batch, order: float, anchors: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the module's docstring; `anchors` [F, D]."""
    device = towers.t.device
    seen = functional.normalize(towers.look.of(batch.moments.to(device)), dim=1)
    ladders = [text for each in batch.rungs for text in each]
    said = towers.sentences([*batch.captions, *ladders])
    logits = towers.logits(seen, said[: len(batch.captions)])
    sign = 2.0 * batch.true.to(device) - 1
    pair = functional.softplus(-sign * logits).sum(1).mean()
    some = torch.cat([seen[: batch.own], seen[len(seen) - batch.blank :]])
    marks, scale = functional.normalize(anchors, dim=1), towers.t.exp()
    named = -(batch.stated.to(device) * (scale * said @ marks.T).log_softmax(1)).sum(1).mean()
    ranked, led, at = pair.new_zeros(()), pair.new_zeros(()), len(batch.captions)
    for rungs, numbers, places in zip(batch.rungs, batch.ranks, batch.places.T, strict=True):
        nothing = functional.one_hot(torch.zeros(batch.blank, dtype=torch.int64), len(rungs))
        wanted = torch.cat([between(places, len(rungs)), nothing]).to(device)
        ranked = ranked + functional.cross_entropy(
            scale * some @ said[at : at + len(rungs)].T, wanted
        )
        led = led + functional.cross_entropy(scale * some @ marks[numbers].T, wanted)
        at += len(rungs)
    count = max(len(batch.rungs), 1)
    total = pair + order * (ranked + led) / count + order * named
    metrics = {"pairs": pair, "order": ranked / count, "led": led / count, "named": named}
    return total, {name: value.item() for name, value in metrics.items()}


def between(places: Tensor, count: int) -> Tensor:
    """Weights [n, count] on the rungs around each of `places` [n], of which rung 0 says that there
    is nothing to be seen: place 0 is rung 1."""
    places = places.clamp(0, count - 2)
    low = places.floor().long().clamp(max=max(count - 3, 0))
    share = (places - low)[:, None]
    lower, upper = (functional.one_hot(low + shift, count) for shift in (1, 2))
    return (1 - share) * lower + share * upper


def train(
    worlds: Sequence[Scenes],
    plan: Plan,
    shape: Shape,
    kept: Path,
    told: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    device: torch.device | str = "cpu",
) -> Towers:
    """Train for `plan.steps` steps; goes on from `kept` if it is there, and keeps what it has there
    every `plan.save_every` steps."""
    torch.manual_seed(plan.seed)
    towers, corpus = Towers(shape).to(device), Corpus(worlds)
    anchors = torch.nn.Parameter(torch.randn(corpus.count, shape.size, device=device))
    learned = [*towers.parameters(), anchors]
    optimizer = torch.optim.AdamW(learned, plan.rate, weight_decay=plan.decay)
    corpus.look(towers, plan, kept.parent)
    some = torch.cat([each.flatten(0, 1)[::5] for each in corpus.moments])
    towers.look.fit(some.float())
    begin = 0
    if kept.exists():
        state: dict[str, Any] = torch.load(kept, weights_only=True, map_location=device)
        towers.load_state_dict(state["towers"])
        anchors.data.copy_(state["anchors"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    for step in range(begin, plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * pace(step, plan, plan.steps)
        loss, metrics = loss_of(towers, drawn(corpus, plan, step), plan.order, anchors)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 5.0)
        optimizer.step()
        told(step + 1, metrics)
        if (step + 1) % plan.save_every == 0 or step + 1 == plan.steps:
            keep(kept, towers, anchors, optimizer, step + 1)
    polish(towers, corpus, plan, told)
    return towers.eval()


def polish(
    towers: Towers, corpus: Corpus, plan: Plan, told: Callable[[int, dict[str, float]], None]
) -> None:
    """Pictures alone, against sentences that stay where they are: their embeddings are computed
    once, and a step costs a tenth."""
    device = towers.t.device
    with torch.no_grad():
        said = [towers.sentences(phrases) for phrases in corpus.phrases]
    optimizer = torch.optim.AdamW(towers.look.head.parameters(), plan.rate, weight_decay=0.1)
    for step in range(plan.polish):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * pace(step, plan, plan.polish)
        random = torch.Generator().manual_seed(plan.seed * 1_000_003 + 500_000 + step)
        picks = [int(torch.randint(len(each), (1,), generator=random)) for each in said]
        marks = torch.stack([each[pick] for each, pick in zip(said, picks, strict=True)])
        loss, metrics = polished(towers, corpus, plan, marks.to(device), random)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told(plan.steps + step + 1, metrics)


def polished(
    towers: Towers, corpus: Corpus, plan: Plan, marks: Tensor, random: torch.Generator
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one batch of one world's pictures, and of nothing, against one sentence of every
    fact `marks` [F, D]."""
    sizes = torch.tensor([float(len(scenes)) for scenes in corpus.worlds])
    world = int(torch.multinomial(sizes, 1, generator=random))
    index = torch.randint(len(corpus.worlds[world]), (plan.batch,), generator=random)
    variant = torch.randint(plan.variants, (plan.batch,), generator=random)
    none = torch.randint(len(corpus.nothing), (plan.batch // 20,), generator=random)
    looks = torch.cat([corpus.moments[world][variant, index], corpus.nothing[none]]).float()
    looks = glimpsed(looks, corpus.single, random).to(marks.device)
    seen = functional.normalize(towers.look.of(looks), dim=1)
    facts = torch.zeros(len(seen), corpus.count)
    facts[: plan.batch] = corpus.facts(world, index).float()
    facts[plan.batch :, -1] = 1
    sign = 2 * facts.to(marks.device) - 1
    pair = functional.softplus(-sign * towers.logits(seen, marks)).sum(1).mean()
    ranked, places = pair.new_zeros(()), corpus.worlds[world].places[index]
    for numbers, place in zip(rungs_of(corpus, world), places.T, strict=True):
        close = towers.t.exp() * seen @ marks[[corpus.count - 1, *numbers]].T
        empty = functional.one_hot(torch.zeros(len(none), dtype=torch.int64), close.shape[1])
        wanted = torch.cat([between(place, close.shape[1]), empty]).to(marks.device)
        ranked = ranked + functional.cross_entropy(close, wanted)
    ranked = ranked / max(places.shape[1], 1)
    return pair + plan.order * ranked, {"pairs": pair.item(), "order": ranked.item()}


def pace(step: int, plan: Plan, steps: int) -> float:
    """The learning rate's share: a warm-up, then half a cosine."""
    if step < plan.warm:
        return (step + 1) / plan.warm
    done = (step - plan.warm) / max(steps - plan.warm, 1)
    return 0.5 * (1 + math.cos(math.pi * done))


def keep(
    path: Path, towers: Towers, anchors: Tensor, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Write everything that is needed to go on; a killed process leaves the old file."""
    part, state = path.with_suffix(".part"), {"towers": towers.state_dict(), "step": step}
    torch.save({**state, "anchors": anchors.data, "optimizer": optimizer.state_dict()}, part)
    part.rename(path)
