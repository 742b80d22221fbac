"""Random shifts by hand."""

from __future__ import annotations

import torch
from torch.nn import functional

from embodied.buffers.augment import RandomShift, random_shift, shift_by_index, shift_on_cpu
from embodied.core.spec import Leaf, Spec
from embodied.datasets.transitions import Dataset


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


def test_every_way_of_shifting_crops_the_same() -> None:
    """Bit for bit: copied lines, indexed pixels, a crop of the padded image, grid_sample."""
    torch.manual_seed(0)
    pad, n, height, width = 4, 81, 12, 10
    pictures = torch.randint(256, (n, height, width, 3), dtype=torch.uint8)
    moved = torch.cartesian_prod(torch.arange(-pad, pad + 1), torch.arange(-pad, pad + 1)).T
    shifted = shift_on_cpu(pictures, moved)
    assert torch.equal(shifted, shift_by_index(pictures, moved))
    planes = functional.pad(pictures.permute(0, 3, 1, 2).float(), (pad,) * 4, "replicate")
    for i, (dy, dx) in enumerate((moved + pad).T.tolist()):
        crop = planes[i, :, dy : dy + height, dx : dx + width]
        assert torch.equal(shifted[i], crop.permute(1, 2, 0).byte())
    size = torch.tensor([width + 2 * pad, height + 2 * pad])
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([x, y], 2) + (moved + pad).T.flip(1)[:, None, None]
    sampled = functional.grid_sample(planes, (2 * pixels + 1) / size - 1, align_corners=False)
    assert torch.equal(shifted, sampled.round().byte().permute(0, 2, 3, 1))
    strided = pictures.permute(0, 2, 1, 3)  # not contiguous, and floats
    assert torch.equal(shift_on_cpu(strided, moved), shift_by_index(strided, moved))
    assert torch.equal(
        shift_on_cpu(pictures.float(), moved), shift_by_index(pictures.float(), moved)
    )


def test_shifts_wider_than_the_picture() -> None:
    pictures = torch.randint(256, (50, 3, 4, 1), dtype=torch.uint8)
    shifted = random_shift(pictures, 5)
    assert shifted.shape == pictures.shape
    assert all(
        set(a.flatten().tolist()) >= set(b.flatten().tolist())
        for a, b in zip(pictures, shifted, strict=True)
    )


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
    shifted = RandomShift(data, spec, 2).sample(20)
    changed = {key for key in plain if not torch.equal(plain[key], shifted[key])}
    assert changed == {"obs/eye", "next_obs/eye"}
    assert len(RandomShift(data, spec, 2)) == 50
