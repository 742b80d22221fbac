"""Decision: a policy's decision as one function of tensors for export; comparison with PyTorch.

ONNX export of a policy, for onnxruntime, TensorRT and others.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.core import checkpoint
from embodied.core.build import ConfigError
from embodied.core.policy import Policy
from embodied.core.saved_node import executed_steps
from embodied.core.spec import Leaf, hidden
from embodied.core.tensors import HISTORY, is_history

TOLERANCE = 1e-5  # of half an action's range
ROUNDING = 4 * torch.finfo(torch.float32).eps  # of a number in physical units
SIZES = (1, 2, 64)  # batch sizes of the comparison; 2 is traced


class Decision(nn.Module):
    """`forward(*observations, noise)` returns actions [n, chunk, A]; `inputs` gives the order.

    It uses the policy's `inference_policy()`. ConfigError for policies with a carry between
    decisions; carry keys below `row/` (stored with the decision) and `explore/` (exploration) are
    ignored, and past observations (`core.tensors`) become inputs: `obs/history/NAME` [n, k, ...].
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        policy = policy.inference_policy()
        carry = policy.initial(1)
        kept = [key for key in carry if not key.startswith(("row/", "explore/"))]
        carried = [key for key in kept if not is_history(key)]
        if carried:
            raise ConfigError(
                f"{type(policy).__name__} carries {', '.join(carried)} from one decision to the "
                "next, and an exported policy has no memory: export the policy it is based on"
            )
        self.policy = policy.requires_grad_(False)
        self.eval()  # of this module too: exporters restore its mode
        self.leaves = {k: leaf for k, leaf in sorted(policy.spec.obs.items()) if not hidden(k)}
        for name in sorted({k.rpartition(HISTORY)[2] for k in kept if HISTORY in k}):
            past = next(carry[key] for key in kept if key.endswith(HISTORY + name))
            leaf = replace(self.leaves[name], shape=tuple(past.shape[1:]))
            self.leaves[HISTORY + name] = leaf
        self.noise = policy.sample_noise(1).shape[1:]

    @property
    def inputs(self) -> list[str]:
        return [*(f"obs/{name}" for name in self.leaves), "noise"]

    def forward(self, *given: Tensor) -> Tensor:
        obs, noise = dict(zip(self.leaves, given[:-1], strict=True)), given[-1]
        seen, carry = self.policy.observe(obs, {}, noise)
        return self.policy.act(seen, carry, noise)[0]

    def example(self, n: int) -> tuple[Tensor, ...]:
        """Example inputs of `forward`: observations within their bounds, exploration noise."""
        seen = [leaf.sample(n) for leaf in self.leaves.values()]
        return (*seen, self.policy.sample_noise(n, explore=True))


@dataclass(frozen=True)
class Export:
    """An exported file and its largest difference to PyTorch (None: could not be run here)."""

    path: Path
    difference: float | None
    checked_by: str


def compare(decision: Decision, other: Callable[[tuple[Tensor, ...]], Tensor]) -> float:
    """The largest difference over a few random batches, in half ranges of the action's elements
    ([-1, 1]: as it is); ConfigError if above TOLERANCE."""
    worst = 0.0
    radius = half_range(decision.policy.spec.act)
    for n in SIZES:
        given = decision.example(n)
        expected, found = decision(*given), other(given)
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise ConfigError(
                f"the exported policy gives {found.dtype} {list(found.shape)} where PyTorch gives "
                f"{expected.dtype} {list(expected.shape)}: it is not written"
            )
        found, expected = found.flatten(0, 1).double(), expected.flatten(0, 1).double()
        largest = expected.abs().nan_to_num(0.0)
        # Unclipped actions are beyond their bounds; the range is then what is seen of them.
        spread = (expected.amax(0) - expected.amin(0)).nan_to_num(0.0) / 2
        unit = torch.maximum(radius, spread)
        apart = ((found - expected).abs() - ROUNDING * largest).clamp(min=0) / unit
        apart[found.isnan() & expected.isnan()] = 0
        worst = max(worst, apart.nan_to_num(math.inf).max().item())
    if not worst <= TOLERANCE:
        raise ConfigError(
            f"the exported policy differs from PyTorch by {worst:.1e}, more than {TOLERANCE}: "
            "it is not written"
        )
    return worst


def half_range(act: Leaf) -> Tensor:
    """Half the range of each element of an action, [*shape]; 1 where it has no bounds."""
    ends: list[Tensor] = []
    for bound in (act.low, act.high):
        values = bound if isinstance(bound, tuple) else (bound,)
        known = [math.nan if value is None else float(value) for value in values]
        ends.append(torch.tensor(known, dtype=torch.float64).expand(act.size).view(act.shape))
    half = (ends[1] - ends[0]) / 2
    return torch.where(half.isfinite() & (half > 0), half, 1.0)


def facts(decision: Decision, run: Path | None = None) -> dict[str, Any]:
    """Metadata for users of the exported file, as plain values.

    `noise`: "zeros" if the policy acts with zero noise, "normal" if every decision needs new
    standard normal noise; `execute`: steps of the chunk to execute before the next decision.
    """
    policy = decision.policy
    about: dict[str, Any] = {
        "producer": f"embodied-rl {version('embodied-rl')}",
        "policy": policy.node["_target_"],
        "text": policy.spec.text,
        "dt": policy.spec.dt,
        "chunk": policy.chunk,
        "execute": policy.chunk,
        "inputs": decision.inputs,
        "noise": "normal" if policy.sample_noise(8).any() else "zeros",
        "spec": policy.spec.to_json(),
    }
    if run is not None:
        folder = checkpoint.find(run)
        saved = checkpoint.read_about(folder)
        about |= {key: saved.get(key) for key in ("step", "policy_sha256", "git")}
        about["execute"] = executed_steps(folder) or policy.chunk
    return about


@contextmanager
def tracing() -> Iterator[None]:
    """Disable gradients and tracing warnings; the traced result is compared afterwards."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


OPSET = 17


def write_onnx(decision: Decision, facts: dict[str, Any], path: Path) -> Export:
    """Write `path`; inputs and the output `actions` have a dynamic batch size n.

    `facts` become metadata, as JSON if not text. The model is first run with onnxruntime on random
    inputs; ConfigError, and no file, if it differs from PyTorch. An input that the policy does not
    use is not in the file.
    """
    try:
        import onnx
        import onnxruntime
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"ONNX needs the package {error.name}: pip install 'embodied-rl[export]'"
        ) from error

    partial = path.with_name(f".{path.name}.partial")
    try:
        names = decision.inputs
        with tracing():
            torch.onnx.export(
                decision,
                decision.example(2),
                str(partial),
                input_names=names,
                output_names=["actions"],
                dynamic_axes={name: {0: "n"} for name in [*names, "actions"]},
                opset_version=OPSET,
                dynamo=False,  # its exporter needs one more package and has no benefit here
            )
        model = onnx.load(str(partial))
        entries = {k: v if isinstance(v, str) else json.dumps(v) for k, v in facts.items()}
        onnx.helper.set_model_props(model, entries)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, str(partial))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            str(partial), options, providers=["CPUExecutionProvider"]
        )

        def other(given: tuple[Tensor, ...]) -> Tensor:
            feed = {k: v.numpy() for k, v in zip(decision.inputs, given, strict=True)}
            used = {each.name for each in session.get_inputs()}
            feed = {name: value for name, value in feed.items() if name in used}
            return torch.from_numpy(session.run(["actions"], feed)[0])

        difference = compare(decision, other)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Export(path, difference, f"onnxruntime {onnxruntime.__version__}")


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
