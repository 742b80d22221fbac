"""Large arrays in huge pages behave as `torch.empty`'s, and Linux really gives the pages."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

from embodied.buffers.replay import LEAST, ReplayBuffer, empty

ROWS = LEAST // 4 // 16  # of 16 floats
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kb() -> int:
    """Memory of this process in huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"AnonHugePages:\s+(\d+)", text)[1])  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_it_has_shape_and_type_and_can_be_written(dtype: torch.dtype) -> None:
    made = empty((ROWS, 4, 16), dtype, "cpu")
    assert made.shape == (ROWS, 4, 16) and made.dtype == dtype and made.is_contiguous()
    made[3] = 7
    other = copy.deepcopy(made[2:5])
    del made
    assert int(other[1].sum()) == 7 * 64


@pytest.mark.skipif(
    not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="no huge pages on this system"
)
def test_a_large_array_is_in_huge_pages_and_goes_with_its_tensor() -> None:
    before = huge_kb()
    made = empty((ROWS, 16), torch.float32, "cpu")
    made.fill_(1.0)
    assert huge_kb() - before > LEAST // 1024 // 2
    del made
    assert huge_kb() - before < LEAST // 1024 // 2


def test_a_large_replay_buffer_gives_back_what_was_stored() -> None:
    buffer = ReplayBuffer(ROWS + 1)
    rows = {"obs/state": torch.randn(50, 15), "reward": torch.randn(50)}
    buffer.add(rows)
    taken = buffer.take(torch.arange(50))
    assert all(torch.equal(taken[key], rows[key]) for key in rows)
    other = ReplayBuffer(ROWS + 1)
    other.set_state(buffer.get_state())
    assert torch.equal(other.take(torch.arange(50))["reward"], rows["reward"])
