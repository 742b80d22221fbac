"""Random shifts by hand."""

from __future__ import annotations

import torch

from embodied.core.spec import Leaf, Spec
from embodied.data.augment import Shift, random_shift
from embodied.data.dataset import Dataset


def test_every_shift_is_one_of_the_nine_and_all_occur() -> None:
    picture = torch.arange(12, dtype=torch.uint8).view(1, 3, 4, 1)
    padded = torch.tensor(
        [
            [0, 0, 1, 2, 3, 3],
            [0, 0, 1, 2, 3, 3],
            [4, 4, 5, 6, 7, 7],
            [8, 8, 9, 10, 11, 11],
            [8, 8, 9, 10, 11, 11],
        ],
        dtype=torch.uint8,
    )
    allowed = {
        tuple(padded[y : y + 3, x : x + 4].flatten().tolist()) for y in range(3) for x in range(3)
    }
    random = torch.Generator().manual_seed(0)
    shifted = random_shift(picture.expand(200, -1, -1, -1), 1, random)
    assert shifted.shape == (200, 3, 4, 1) and shifted.dtype == torch.uint8
    assert {tuple(one.flatten().tolist()) for one in shifted} == allowed


def test_no_shift_and_the_generator_decides() -> None:
    pictures = torch.rand(5, 8, 6, 3)
    assert torch.equal(random_shift(pictures, 0), pictures)
    same = [random_shift(pictures, 2, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*same) and not torch.equal(same[0], pictures)


def test_only_pictures_of_a_batch_are_shifted() -> None:
    spec = Spec(
        {
            "eye": Leaf((9, 9, 3), "uint8"),
            "cell": Leaf((3, 3, 3), "uint8", 0, 5, "symbol"),
            "state": Leaf((2,)),
        },
        Leaf((1,)),
        0.1,
    )
    rows = {
        f"{when}/{name}": torch.randint(6, (50, *leaf.shape)).to(leaf.zeros(1).dtype)
        for name, leaf in spec.obs.items()
        for when in ("obs", "next_obs")
    }
    data = Dataset(rows)
    torch.manual_seed(0)
    plain = data.sample(20)
    torch.manual_seed(0)
    shifted = Shift(data, spec, 2).sample(20)
    changed = {key for key in plain if not torch.equal(plain[key], shifted[key])}
    assert changed == {"obs/eye", "next_obs/eye"}
    assert len(Shift(data, spec, 2)) == 50
