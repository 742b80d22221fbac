"""Training batches for SimClip: scenes of all environments with captions and facts.

The fixed features of all images are computed once (`Towers.look.moments`), with and without
augmentation; captions are sampled anew in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from benchmarks.simclip.captions import Scenes
from embodied.vision.simclip import BLANK, Towers, resize_views, words_of

BLANKS = (BLANK, "an empty picture", "no scene in view", "the picture is empty", "nothing in view")
STRAYS = words_of(
    "red bus street rain dog cat piano sings river mountain bread window old woman child reads "
    "newspaper garden tree flower boat sails storm horse kitchen plate soup guitar plays dances "
    "moon night train station waits umbrella book letter winter snow football crowd sleeps chair"
)
LINKS = (" and ", ", ", " while ", "; ", " with ")


@dataclass(frozen=True)
class Plan:
    """`steps` of `batch` images with AdamW, warm-up and cosine decay; then `polish` steps of the
    image head; `order`: weight c of the ladder loss; `variants`: versions of every image, augmented
    but for the first."""

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
    """Scenes of all environments with a common numbering of facts, and the facts of every
    phrasing."""

    def __init__(self, envs: Sequence[Scenes], held_out: bool = False) -> None:
        self.envs = list(envs)
        facts = [fact for scenes in envs for fact in scenes.words.facts]
        self.count = len(facts) + 1  # the last one: an empty image
        self.first = [0]
        for scenes in envs:
            self.first.append(self.first[-1] + len(scenes.words.facts))
        said = [fact.held_out if held_out else fact.phrases for fact in facts]
        self.phrases: list[tuple[str, ...]] = [*said, BLANKS]
        self.means: dict[str, set[int]] = {}
        for number, each in enumerate(self.phrases):
            for phrase in each:
                self.means.setdefault(phrase, set()).add(number)
        # Rare facts are sampled as often as common ones.
        self.rare = [1 / scenes.facts.float().mean(0).clamp(min=0.01) for scenes in envs]

    def look(self, towers: Towers, plan: Plan, folder: Path) -> None:
        """Compute the fixed features of all images: `moments` of each environment [V, N, F], and of
        empty images `nothing` [n, F]; cached in `folder`."""
        random, self.single = torch.Generator().manual_seed(plan.seed), towers.look.each.size
        empty = blank_images(300, towers.shape.side, towers.shape.views, random)
        self.nothing = colour_moments(towers, empty, 0, random)
        self.moments: list[Tensor] = []
        for scenes in self.envs:
            random.manual_seed(plan.seed)
            sort = f"{len(scenes)}-{plan.variants}-{towers.shape.views}"
            path = folder / f"moments-{scenes.env}-{sort}.safetensors"
            if not path.exists():
                each = [
                    colour_moments(towers, scenes.pictures, v, random) for v in range(plan.variants)
                ]
                save_file({"moments": torch.stack(each)}, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
            self.moments.append(load_file(path)["moments"])

    def facts(self, env: int, index: Tensor) -> Tensor:
        """Facts [n, count] (bool) of images `index` [n]."""
        known = torch.zeros(len(index), self.count, dtype=torch.bool)
        known[:, self.first[env] : self.first[env + 1]] = self.envs[env].facts[index]
        return known

    def caption(self, env: int, index: Tensor, random: torch.Generator) -> list[list[str]]:
        """A caption for every image: one to three true phrases."""
        weights = self.envs[env].facts[index] * self.rare[env]
        most = int((weights > 0).sum(1).min())
        chosen = torch.multinomial(weights, min(3, most), generator=random)
        counts = torch.randint(1, chosen.shape[1] + 1, (len(index),), generator=random)
        return [
            [self.phrase(self.first[env] + number, random) for number in row[:count]]
            for row, count in zip(chosen.tolist(), counts.tolist(), strict=True)
        ]

    def phrase(self, fact: int, random: torch.Generator) -> str:
        """A random phrasing of a fact."""
        each = self.phrases[fact]
        return each[int(torch.randint(len(each), (1,), generator=random))]

    def shares(self, sentences: Sequence[Sequence[str]]) -> Tensor:
        """Facts that each sentence states [M, count], rows that sum to one (or to zero)."""
        shares = torch.zeros(len(sentences), self.count)
        for row, sentence in enumerate(sentences):
            for phrase in sentence:
                for number in self.means[phrase]:
                    shares[row, number] += 1 / len(self.means[phrase]) / len(sentence)
        return shares

    def hold(self, captions: Sequence[Sequence[str]], facts: Tensor) -> Tensor:
        """Which captions [M] are true of images with `facts` [n, count]: [n, M] (bool). An
        ambiguous phrase is true if one of its facts is."""
        true = torch.ones(len(facts), len(captions), dtype=torch.bool)
        for column, caption in enumerate(captions):
            for phrase in caption:
                true[:, column] &= facts[:, sorted(self.means.get(phrase, ()))].any(1)
        return true


@dataclass(slots=True)
class Batch:
    """`moments` [n, F]: image features; `captions`, and of which images they are `true` [n, M];
    `rungs`: sentences of each ladder of the first `own` images' environment, worst first, and their
    `places` [own, L]; the last `blank` images are empty. `stated` [M + rungs, F]: facts stated by
    each sentence; `ranks`: indices of the rungs' facts, the empty one first."""

    moments: Tensor
    captions: list[str]
    true: Tensor
    rungs: list[list[str]]
    places: Tensor
    own: int
    blank: int
    stated: Tensor
    ranks: list[list[int]]


def sample_batch(corpus: Corpus, plan: Plan, step: int) -> Batch:
    """The batch of one step: three quarters from one environment, so that its captions must be
    distinguished, with some empty images and unrelated sentences."""
    random = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    sizes = torch.tensor([float(len(scenes)) for scenes in corpus.envs])
    main = int(torch.multinomial(sizes, 1, generator=random))
    others = torch.multinomial(sizes, 3, replacement=True, generator=random).tolist()
    own, rest, blank = 3 * plan.batch // 4, plan.batch // 16, plan.batch // 16
    seen, facts, captions = [], [], []
    for env, count in [(main, own), *((other, rest) for other in others)]:
        index = torch.randint(len(corpus.envs[env]), (count,), generator=random)
        variant = torch.randint(plan.variants, (count,), generator=random)
        seen.append(corpus.moments[env][variant, index])
        facts.append(corpus.facts(env, index))
        captions += corpus.caption(env, index[: max(count // 3, 1)], random)
        if len(seen) == 1:
            places = corpus.envs[env].places[index]
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
    strays = [unrelated_sentence(random) for _ in range(4)]
    texts = [join_phrases(caption, random) for caption in captions] + strays
    sentences = [*captions, *([] for _ in strays), *([text] for each in rungs for text in each)]
    true = torch.cat([true, torch.zeros(len(true), len(strays), dtype=torch.bool)], 1)
    return Batch(
        drop_views(torch.cat(seen).float(), corpus.single, random),
        texts,
        true,
        rungs,
        places,
        own,
        blank,
        corpus.shares(sentences),
        numbers,
    )


def rungs_of(corpus: Corpus, env: int) -> list[list[int]]:
    """Indices of the facts of each ladder of an environment."""
    found, number = [], corpus.first[env]
    for ladder in corpus.envs[env].words.ladders:
        found.append(list(range(number, number + len(ladder.rungs))))
        number += len(ladder.rungs)
    return found


def join_phrases(phrases: Sequence[str], random: torch.Generator) -> str:
    """Phrases joined to one sentence."""
    link = LINKS[int(torch.randint(len(LINKS), (1,), generator=random))]
    return link.join(phrases)


def drop_views(moments: Tensor, single: int, random: torch.Generator) -> Tensor:
    """Images [N, F] with all views but the first removed from every fourth; one view has `single`
    features."""
    moments[torch.rand(len(moments), generator=random) < 0.25, single:] = torch.nan
    return moments


def unrelated_sentence(random: torch.Generator) -> str:
    """A sentence that is true of no scene."""
    count = int(torch.randint(3, 9, (1,), generator=random))
    picks = torch.randint(len(STRAYS), (count,), generator=random)
    return " ".join(STRAYS[pick] for pick in picks.tolist())


def blank_images(count: int, side: int, views: int, random: torch.Generator) -> Tensor:
    """Empty images: one colour, black, or noise, uint8 [count, side, views side, 3]."""
    colour = torch.randint(256, (count, 1, 1, 3), generator=random)
    colour[::3] = 0
    noise = torch.randint(-60, 61, (count, side, views * side, 3), generator=random)
    noise[: count // 2] //= 20
    return (colour + noise).clamp(0, 255).to(torch.uint8)


@torch.no_grad()
def colour_moments(
    towers: Towers, pictures: Tensor, variant: int, random: torch.Generator
) -> Tensor:
    """Fixed features of images, [N, F] in half precision; augmented unless `variant` is 0."""
    device = towers.t.device
    parts = [
        towers.look.moments(
            resize_views(augment(p, random) if variant else p, towers.shape.side).to(device)
        )
        for p in pictures.split(200)
    ]
    return torch.cat(parts).half().cpu()


def augment(pictures: Tensor, random: torch.Generator) -> Tensor:
    """Random brightness, tint and noise; every fifth image at lower resolution."""
    count, (side, width) = len(pictures), pictures.shape[1:3]
    gain = 0.8 + 0.4 * torch.rand(count, 1, 1, 1, generator=random)
    tint = 0.92 + 0.16 * torch.rand(count, 1, 1, 3, generator=random)
    shift = 24 * torch.rand(count, 1, 1, 1, generator=random) - 12
    # One noise image for all, with random strengths: one for each would cost more than a step.
    grain = torch.randn(1, *pictures.shape[1:], generator=random)
    strength = 8 * torch.rand(count, 1, 1, 1, generator=random) - 4
    changed = pictures.float() * (gain * tint) + (shift + strength * grain)
    coarse = changed[::5].permute(0, 3, 1, 2)
    coarse = functional.interpolate(coarse, (2 * side // 3, 2 * width // 3), mode="area")
    coarse = functional.interpolate(coarse, (side, width), mode="bilinear")
    changed[::5] = coarse.permute(0, 2, 3, 1)
    return changed.clamp(0, 255).to(torch.uint8)
