"""MemmapReplayBuffer: a replay buffer larger than memory, in memory-mapped files.

Transitions have the layout of `ReplayBuffer`; the operating system caches the files. The files
persist: a buffer opened on a folder with transitions appends to them.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.buffers.replay import ReplayBuffer
from embodied.core import tensors as tt
from embodied.core.atomic_write import write_durably
from embodied.core.build import ConfigError
from embodied.core.tensors import Tensors

FORMAT = 2  # of the files


@dataclass(frozen=True)
class Config:
    folder: str | None = None  # of the files (null: `replay` in the run's folder)


class MemmapReplayBuffer(ReplayBuffer):
    """A ReplayBuffer on disk; sampled batches are moved to `device`. A checkpoint stores only the
    write position, not the transitions. Resuming is exact as long as the folder still exists and
    the ring buffer has not wrapped around since the checkpoint."""

    def __init__(
        self,
        config: Config,
        capacity: int,
        device: torch.device | str = "cpu",
        folder: Path | str = "replay",
    ) -> None:
        super().__init__(capacity, "cpu")
        self.out = torch.device(device)
        self.folder = Path(folder if config.folder is None else config.folder)
        self.head = torch.zeros(2, dtype=torch.int64)  # stored transitions, write position
        if (self.folder / "layout.json").exists():
            facts = json.loads((self.folder / "layout.json").read_text())
            if facts["capacity"] != self.capacity:
                raise ConfigError(
                    f"{self.folder} holds a replay buffer of capacity {facts['capacity']}, not "
                    f"{self.capacity}: use the same data.replay_size, or another replay.folder"
                )
            if facts.get("format") != FORMAT:
                raise ConfigError(
                    f"{self.folder} was written by another version of embodied: choose another "
                    "replay.folder"
                )
            kinds = {
                key: (shape, getattr(torch, kind)) for key, (shape, kind) in facts["rows"].items()
            }
            self._open({key: torch.empty(0, *s, dtype=kind) for key, (s, kind) in kinds.items()})
            self._go_to(*self.head.tolist())

    def room(self) -> tuple[int, str]:
        there = next(path for path in self.folder.resolve().parents if path.exists())
        held = sum(path.stat().st_blocks * 512 for path in self.folder.glob("*.bin"))
        return shutil.disk_usage(there).free + held, f"disk ({self.folder})"

    def add(self, rows: Tensors) -> None:
        super().add(rows)
        # Written last: a killed process never counts transitions that it has not written.
        self.head[0], self.head[1] = self.size, self.cursor

    def sample(self, n: int) -> Tensors:
        rows = super().sample(n)
        return rows if self.out.type == "cpu" else tt.to(rows, self.out)

    def get_state(self) -> dict[str, Any]:
        facts = {"capacity": self.capacity, "cursor": self.cursor, "size": self.size}
        return {**facts, "folder": str(self.folder.resolve())}

    def set_state(self, state: dict[str, Any]) -> None:
        self._require_capacity(state)
        if state["size"] > self.size:
            raise ConfigError(
                f"{self.folder} holds {self.size} transitions, but the checkpoint needs "
                f"{state['size']} in {state['folder']}: restore that folder"
            )
        self._go_to(state["size"], state["cursor"])

    def _go_to(self, size: int, cursor: int) -> None:
        """Count the first `size` transitions as all that there are."""
        self.size, self.cursor = size, cursor
        for name, store in self._stores.items():
            store.restore([self._apart[key][:size] for key in self._pictures[name]])

    def _allocate(self, rows: Tensors) -> None:
        layout = {
            key: [list(value.shape[1:]), str(value.dtype).removeprefix("torch.")]
            for key, value in rows.items()
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        self._open(rows)
        facts = {"format": FORMAT, "capacity": self.capacity, "rows": layout}
        text = json.dumps(facts, indent=1).encode()
        write_durably(self.folder / "layout.json", lambda sink: sink.write(text))

    def _open(self, rows: Tensors) -> None:
        """Memory-map the files of transitions with the leaves of `rows`."""
        super()._allocate(rows)
        self.head = self._array("head", (2,), torch.int64)

    def _array(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A memory-mapped file, which is made if it does not exist."""
        if not math.prod(shape):
            return torch.empty(*shape, dtype=dtype)
        path = str(self.folder / f"{name.replace('/', '-')}.bin")
        return torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(*shape)

    def _first_room(self, most: int) -> int:
        return most  # what is not used takes no space on a disk
