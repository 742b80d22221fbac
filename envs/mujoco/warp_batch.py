"""WarpBatch: a batch of one MuJoCo model in MuJoCo Warp, with all substeps as one CUDA graph.

Source: MuJoCo Warp (Google DeepMind and NVIDIA, 2025), single precision. State tensors share Warp's
memory, on the GPU or on the host (Warp's CPU backend): nothing is copied. The graph of kernel
launches is captured once and replayed; launching the kernels one by one from Python takes tens of
times longer than the computation of a small batch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mujoco
import torch
from torch import Tensor

from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors

MISSING = "MuJoCo Warp is not installed; type: pip install 'embodied-rl[warp]'"
NO_DRIVER = b"Could not find or load the NVIDIA CUDA driver"

try:
    import warp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(MISSING, name="warp") from error


def _without_driver_warning(start: Callable[[], None]) -> None:
    """Call `start`; what native code says about a machine without a GPU is not passed on."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            start()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            os.write(2, b"".join([line for line in said if NO_DRIVER not in line]))


# Warp greets at its start and then names every kernel that it loads.
warp.config.log_level = max(warp.config.log_level, warp.LOG_ERROR)
_without_driver_warning(warp.init)

try:
    import mujoco_warp
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(MISSING, name="mujoco_warp") from error

__all__ = ["mujoco_warp", "tell_about_compiling", "warp"]


def tell_about_compiling(name: str, device: str) -> None:
    """Print at the first use on a machine that kernels are being compiled; Warp caches them."""
    built = ".o" if device == "cpu" else ".cubin"
    cache = Path(warp.config.kernel_cache_dir or ".")
    folders = cache.glob("wp_mujoco_warp._src.forward_*")
    if not any(file.suffix == built for folder in folders for file in folder.iterdir()):
        print(f"{name}: compiling MuJoCo Warp's kernels for {device}, once", file=sys.stderr)


STATE = ("qpos", "qvel", "ctrl", "qacc_warmstart", "mocap_pos", "mocap_quat", "time")
"""What a row is: the fields of `mjData` that go on from one step to the next."""
LOST = {
    "contacts": mujoco_warp.OverflowType.BROADPHASE
    | mujoco_warp.OverflowType.NARROWPHASE
    | mujoco_warp.OverflowType.CCD,
    "constraints": mujoco_warp.OverflowType.NEFC,
}
"""What overflows, by the setting that gives it more room."""


class WarpBatch:
    """`rows` parallel copies of `model`; `varied` names the model fields that may differ between
    them.

    `contacts` and `constraints` are capacities: on average over the envs, and per env. `state`
    holds the fields of `STATE` [B, ...] and `field(name)` a model field [B, ...], float32 tensors
    on `device` that may be written in place.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        rows: int,
        device: str,
        *,
        contacts: int,
        constraints: int,
        varied: tuple[str, ...] = (),
    ) -> None:
        self.device = torch.device(device)
        self.warp_device = _device(device)
        with self._on_device():
            self._model = mujoco_warp.put_model(model, batch_sizes=dict.fromkeys(varied, rows))
            self._data = mujoco_warp.make_data(
                model, nworld=rows, nconmax=contacts, njmax=constraints
            )
        option: Any = self._model.opt
        # Overflows are reported by `lost`.
        option.warn_overflow = 0
        if self.warp_device.is_cuda:
            option.graph_conditional = warp.is_conditional_graph_supported()
        self.state: Tensors = {name: _tensor(getattr(self._data, name)) for name in STATE}
        self.origin = self.state["qpos"].clone()
        self._fields = {name: _tensor(getattr(self._model, name)) for name in varied}
        self._overflow = _tensor(self._data.overflow)
        self._graphs: dict[int, Any] = {}

    def field(self, name: str) -> Tensor:
        """The model field `name` [B, ...], one of `varied`."""
        return self._fields[name]

    def step(self, count: int) -> None:
        """Advance every env by `count` physics steps, with one launch."""
        with self._on_device():
            if count not in self._graphs:
                # A graph of `count` steps; the state is as before afterwards.
                before = self.saved()
                # Kernels are compiled and loaded by a step outside of the capture.
                self._run(1)
                warp.synchronize_device(self.warp_device)
                with contextlib.ExitStack() as stack:
                    if self.warp_device.is_cuda:
                        # Torch's default stream, which Warp works in here, cannot be captured.
                        stack.enter_context(warp.ScopedStream(warp.Stream(self.warp_device)))
                    capture = stack.enter_context(warp.ScopedCapture())
                    self._run(count)
                self.load(before)
                self._graphs[count] = capture.graph
            warp.capture_launch(self._graphs[count])

    def lost(self) -> Tensor:
        """Whether contacts or constraints of any env exceeded the capacity since the start, bool
        [].
        """
        every = int(LOST["contacts"] | LOST["constraints"])
        return (self._overflow & every).any()

    def why_lost(self, name: str) -> str:
        """One line about the overflow that `lost` found."""
        short = [key for key, bits in LOST.items() if (self._overflow & int(bits)).any()]
        return f"{name}: MuJoCo Warp ran out of room; raise {' and '.join(short)} of this env"

    def restart(self, mask: Tensor, values: Tensors) -> None:
        """Set the envs `mask` [B] to the fields in `values` [B, ...], zero for all other fields."""
        for name in ("qpos", "qvel", "ctrl", "qacc_warmstart", "mocap_pos", "time"):
            now = self.state[name]
            fresh = values.get(name, torch.zeros((), device=self.device))
            now.copy_(torch.where(_wide(mask, now), fresh.to(now.dtype), now))

    def keep(self, mask: Tensor, before: Tensors) -> None:
        """Restore the envs `mask` [B] to the state `before` (clones of `state`)."""
        for name, value in before.items():
            now = self.state[name]
            now.copy_(torch.where(_wide(mask, now), value, now))

    def saved(self) -> Tensors:
        return {name: value.clone() for name, value in self.state.items()}

    def load(self, state: Tensors) -> None:
        for name, value in self.state.items():
            value.copy_(state[name])

    def _run(self, count: int) -> None:
        for _ in range(count):
            mujoco_warp.step(self._model, self._data)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """Warp works on this device, and on a GPU in torch's stream, so that both keep in order."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(warp.ScopedDevice(self.warp_device))
            if self.warp_device.is_cuda:
                stream = warp.stream_from_torch(torch.cuda.current_stream(self.device))
                stack.enter_context(warp.ScopedStream(stream))
            yield


def _device(name: str) -> Any:
    try:
        return warp.get_device(name)
    except (ValueError, RuntimeError) as error:
        known = ", ".join(str(device) for device in warp.get_devices())
        raise ConfigError(f"device={name!r} is unknown to Warp; available: {known}") from error


def _tensor(array: Any) -> Tensor:
    return warp.to_torch(array, requires_grad=False)


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.ndim - 1))
