"""TorchScript export of a policy for libtorch, with its metadata in `facts.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from embodied.export.decision import Decision, Export, compare, tracing


def write_torchscript(decision: Decision, facts: dict[str, Any], path: Path) -> Export:
    """Write `path`; arguments in the order of `decision.inputs`, with a dynamic batch size.

    The file is loaded again and compared; ConfigError, and no file, if it differs from PyTorch.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with tracing():
            traced: Any = torch.jit.trace(decision, decision.example(2), check_trace=False)
            torch.jit.save(traced, str(partial), _extra_files={"facts.json": json.dumps(facts)})
            loaded: Any = torch.jit.load(str(partial))
            difference = compare(decision, lambda given: loaded(*given))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Export(path, difference, f"torch {torch.__version__}")
