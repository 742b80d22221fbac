"""States with arrays in them survive a checkpoint that holds weights only."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.remembered import pack, unpack


def test_what_is_packed_comes_back_from_a_file_loaded_weights_only(tmp_path: Path) -> None:
    state = {
        "random": np.random.Generator(np.random.PCG64(3)).bit_generator.state,
        3: (np.arange(6.0).reshape(2, 3), "memo", None, True),
        "window": deque([np.float64(0.5), 2], maxlen=5),
        "empty": [np.zeros((0, 4)), torch.ones(2)],
        "number": np.int64(7),
    }
    torch.save(pack(state), tmp_path / "state.pt")
    back = unpack(torch.load(tmp_path / "state.pt", weights_only=True))
    assert back["random"] == state["random"]
    assert (back[3][0] == state[3][0]).all() and back[3][1:] == ("memo", None, True)
    assert back["window"] == deque([0.5, 2], maxlen=5) and back["window"].maxlen == 5
    assert back["empty"][0].shape == (0, 4) and (back["empty"][1] == 1).all()
    assert back["number"] == 7 and type(back["number"]) is int


def test_what_a_checkpoint_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot hold a set"):
        pack({"a": {1, 2}})
