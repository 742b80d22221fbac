"""Image rendering of Crafter, byte-identical to the `crafter` package, from precomputed tiles.

Source: Crafter (Hafner, 2021). With daylight l, ground and creatures c and their night version n(c)
(paler, half blue; noisy where l < 1/2),

    picture = l c + (1 - l) n(c).

Without noise n acts per pixel, so the night version of each tile is stored next to its day version.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from embodied.core.spec import SYMBOL, Leaf
from embodied.envs.crafter import rules
from embodied.envs.crafter.player import World

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float64]

NIGHT = np.array((0, 16, 64))
DREAM = np.array((0, 0, 16))
PALE = 0.4  # colour that is left at night
DEPTH = 0.5  # deviation of the noise-free middle
NOISE = (32, 127)
SIZE = 64  # of the package's picture


class Painter:
    """Renders games with cells of `unit` x `unit` pixels; arrays are [x, y] until the last step."""

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.shape = (rules.WIDE * unit, rules.HIGH * unit)
        tiles = _tiles(unit)
        self._day = tiles.astype(np.float64)
        self._night = _tint(_colour(tiles.reshape(-1, unit, 3), PALE), NIGHT).reshape(tiles.shape)
        self._tiles = tiles
        self._items = _item_tiles(unit)
        xs, ys = np.meshgrid(*(np.linspace(-1, 1, side) for side in self.shape))
        self._edge = (1 - np.exp(-0.5 * (xs**2 + ys**2) / (DEPTH**2))).T[..., None]

    def paint(self, world: World, grain: int) -> Pixels:
        """The view above the inventory [9 unit, 9 unit, 3], y before x. `grain` holds the random
        bits of the noise, two words a pixel; it is only read in the dark."""
        player = world.player
        ground, look = in_view(world)
        light = world.light
        if light >= 0.5:
            day = self._day[ground, look]
            night = self._night[ground, look]
            view = _joined(light * day + (1 - light) * night)
        else:
            canvas = _joined(self._tiles[ground, look])
            view = light * canvas + (1 - light) * self._dark(canvas, light, grain)
        view = view.astype(np.uint8)
        if player.sleeping:
            view = _tint(_colour(view, 0.0), DREAM).astype(np.uint8)
        unit, counts = self.unit, player.inventory
        tiles = np.zeros((rules.ITEM_ROWS * rules.WIDE, unit, unit, 3), np.uint8)
        tiles[: len(counts)] = self._items[np.arange(len(counts)), counts]
        rows = tiles.reshape(rules.ITEM_ROWS, rules.WIDE, unit, unit, 3).transpose(0, 3, 1, 2, 4)
        inventory = rows.reshape(rules.ITEM_ROWS * unit, rules.WIDE * unit, 3)
        return np.concatenate([view.transpose(1, 0, 2), inventory])

    def _dark(self, canvas: Pixels, light: float, grain: int) -> Floats:
        # Uniform numbers in [0, 1) from random words, as the Mersenne twister makes doubles.
        count = 2 * self.shape[0] * self.shape[1]
        words = np.frombuffer(grain.to_bytes(4 * count, "little"), np.uint32)
        high, low = words[0::2] >> 5, words[1::2] >> 6
        doubles: Floats = (high.astype(np.float64) * 67108864 + low) / 9007199254740992
        noise = NOISE[0] + (NOISE[1] - NOISE[0]) * doubles.reshape(self.shape)[..., None]
        mask = 2 * (0.5 - light) * self._edge
        noisy = (1 - mask) * canvas + mask * noise
        return _tint(_colour(noisy.astype(np.uint8), PALE), NIGHT)


def in_view(world: World) -> tuple[Pixels, Pixels]:
    """Materials and sprites [9, 7] of the cells in view, x before y."""
    left = world.player.x - rules.WIDE // 2
    top = world.player.y - rules.HIGH // 2
    window = slice(left, left + rules.WIDE), slice(top, top + rules.HIGH)
    ground, look = (
        np.frombuffer(layer, np.uint8).reshape(rules.STRIDE, rules.STRIDE)[window]
        for layer in (world.cells, world.look)
    )
    return ground, look


def picture(world: World) -> Pixels:
    """The image that the package observes: [64, 64, 3], with the noise drawn by the game."""
    out = np.zeros((SIZE, SIZE, 3), np.uint8)
    drawn = painter_of(SIZE // rules.WIDE).paint(world, world.grain)
    out[: drawn.shape[0], : drawn.shape[1]] = drawn
    return out


def portrait(world: World, width: int, height: int) -> Pixels:
    """The same for people, in the middle of [height, width, 3]; noise of its own, nothing drawn
    from the world's generator."""
    unit = max(1, min(width, height) // rules.WIDE)
    painter = painter_of(unit)
    bits = 64 * painter.shape[0] * painter.shape[1]
    drawn = painter.paint(world, Random(world.clock).getrandbits(bits))[:height, :width]
    out = np.zeros((height, width, 3), np.uint8)
    top = (height - drawn.shape[0]) // 2
    left = (width - drawn.shape[1]) // 2
    out[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
    return out


@cache
def painter_of(unit: int) -> Painter:
    return Painter(unit)


def _joined(tiles: NDArray) -> NDArray:
    """Tiles [9, 7, u, u, 3] side by side, [9 u, 7 u, 3]."""
    wide, high, unit = tiles.shape[:3]
    return tiles.transpose(0, 2, 1, 3, 4).reshape(wide * unit, high * unit, 3)


def _colour(pixels: Pixels, amount: float) -> Pixels:
    return np.asarray(ImageEnhance.Color(Image.fromarray(pixels)).enhance(amount))


def _tint(pixels: Pixels, colour: NDArray[np.int64]) -> Floats:
    return 0.5 * pixels + 0.5 * colour


def _texture(name: str, size: int) -> Pixels:
    """One of the package's images, x before y, [size, size, 3 or 4]."""
    pixels = np.asarray(Image.open(rules.PACKAGE / "assets" / f"{name}.png")).transpose(1, 0, 2)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((size, size), resample=Image.Resampling.NEAREST))


def _over(texture: Pixels, canvas: Pixels) -> Pixels:
    """A texture blended over a canvas of its size."""
    if texture.shape[-1] == 3:
        return texture
    alpha = texture[..., 3:].astype(np.float32) / 255
    colour, below = (part.astype(np.float32) / 255 for part in (texture[..., :3], canvas))
    return (255 * (alpha * colour + (1 - alpha) * below)).astype(np.uint8)


def _tiles(unit: int) -> Pixels:
    """Every creature on every ground [1 + materials, looks, u, u, 3]."""
    grey = np.full((unit, unit, 3), 127, np.uint8)
    grounds = [grey, *(_texture(name, unit)[..., :3] for name in rules.MATERIALS)]
    looks = [None, *(_texture(name, unit) for name in rules.LOOKS[1:])]
    return np.stack(
        [
            np.stack([_over(x, ground) if x is not None else ground for x in looks])
            for ground in grounds
        ]
    )


def _item_tiles(unit: int) -> Pixels:
    """Every item with every count [items, 1 + most, u, u, 3]; a count of 0 is black."""
    tiles = np.zeros((len(rules.ITEMS), 1 + max(rules.MOST), unit, unit, 3), np.uint8)
    icon = int(0.8 * unit)
    digit = int(0.6 * unit)
    edge = int(0.1 * unit)
    inset = int(0.4 * unit)
    if digit < 1:
        return tiles
    icon_at = slice(edge, edge + icon)
    digit_at = slice(inset, inset + digit)
    for item, name in enumerate(rules.ITEMS):
        for count in range(1, 1 + rules.MOST[item]):
            tile = tiles[item, count]
            tile[icon_at, icon_at] = _over(_texture(name, icon), tile[icon_at, icon_at])
            tile[digit_at, digit_at] = _over(_texture(str(count), digit), tile[digit_at, digit_at])
    return tiles


Kind = Literal["symbols", "inventory", "image"]


LEAVES: Mapping[Kind, Mapping[str, Leaf]] = {
    "symbols": {
        "symbols": Leaf((rules.HIGH, rules.WIDE), "uint8", 0, len(rules.SYMBOLS) - 1, SYMBOL),
        "facing": Leaf((1,), "uint8", 0, len(rules.WAYS) - 1, SYMBOL),
        "body": Leaf((2,), "float32", 0, 1.0, "", ("sleeping", "daylight")),
    },
    "inventory": {
        "inventory": Leaf((len(rules.ITEMS),), "float32", 0, max(rules.MOST), "", rules.ITEMS)
    },
    "image": {"image": Leaf((SIZE, SIZE, 3), "uint8", 0, 255)},
}
_SYMBOL_OF_LOOK = np.array(
    [
        rules.SYMBOL["ripe plant"]
        if name == "plant-ripe"
        else rules.SYMBOL[name.split("-")[0] or "nothing"]
        for name in rules.LOOKS
    ],
    np.uint8,
)


def leaves(kinds: tuple[Kind, ...]) -> dict[str, Leaf]:
    """The observations for `kinds`, by name."""
    return {name: leaf for kind in kinds for name, leaf in LEAVES[kind].items()}


def seen(world: World) -> NDArray[np.uint8]:
    """The 7 x 9 cells in view as symbols, from the top row; creatures hide the ground."""
    ground, look = in_view(world)
    return np.where(look, _SYMBOL_OF_LOOK[look], ground).T


def observe(world: World, rows: Mapping[str, NDArray], row: int) -> None:
    """Write env `row`'s observations into the arrays in `rows`, by name."""
    for name, array in rows.items():
        if name == "symbols":
            array[row] = seen(world)
        elif name == "facing":
            array[row] = rules.WAYS.index(world.player.way)
        elif name == "body":
            array[row] = world.player.sleeping, world.light
        elif name == "inventory":
            array[row] = world.player.inventory
        else:
            array[row] = picture(world)
