"""One part of a GPU's measurements: `python -m benchmarks.on_gpu PART DIR DEVICE`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.gpu import part
from benchmarks.on_gpu.rows import Scale

if __name__ == "__main__":
    part(sys.argv[1], Path(sys.argv[2]), torch.device(sys.argv[3]), Scale())
