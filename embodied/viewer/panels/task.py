"""The task panel: a slider per element of the task vector, in its own units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from viser import ViserServer

from embodied.core.env import HasTaskParameters
from embodied.core.wrapper import find_protocol
from embodied.viewer.controls import Controls
from embodied.viewer.panels.task_map import MapPanel
from embodied.viewer.session.history import density_of


class TaskPanel:
    """Moving a slider restarts the episode with that task."""

    def __init__(self, server: ViserServer, viewer: Controls) -> None:
        self.viewer, self.session = viewer, viewer.session
        self.sliders: list[Any] = []
        self.ranges: list[tuple[float, float]] = []
        self.map: MapPanel | None = None
        if self.session.spec.task is None:
            return
        with server.gui.add_folder("Task", expand_by_default=False):
            self.fixed = server.gui.add_checkbox(
                "Fixed", False, hint="off: sampled for each episode"
            )
            self._bind(self.fixed, self._apply)
            known = task_ranges(self.session.env)
            for name, low, high, unit in known:
                slider = server.gui.add_slider(
                    name, low, high, (high - low) / 200, low, hint=f"{low:g} to {high:g} {unit}"
                )
                self._bind(slider, self._move)
                self.sliders.append(slider)
                self.ranges.append((low, high))
            self.map = MapPanel(server, viewer, known)
            run, leaf = self.session.run, self.session.spec.task
            picture = None if run is None else density_of(run.folder, leaf.names)
            if picture is not None:
                server.gui.add_image(picture, label="Where the teacher sampled")

    def episode_started(self) -> None:
        """A new episode: the sliders show its task."""
        current = self.session.current_task
        if current is not None:
            for slider, value, (low, high) in zip(self.sliders, current, self.ranges, strict=True):
                slider.value = low + value * (high - low)

    def show(self) -> None:
        """Update the switch and the map."""
        if self.sliders:
            self.fixed.value = self.session.task is not None
        if self.map is not None:
            self.map.draw()

    def _bind(self, control: Any, action: Callable[[], None]) -> None:
        async def pressed(event: Any) -> None:
            # Values set by the program also arrive here, without a client.
            if event.client_id is not None:
                self.viewer.press(action)

        control.on_update(pressed)

    def _move(self) -> None:
        self.fixed.value = True
        self._apply()

    def _apply(self) -> None:
        """Restart with the sliders' values; of many moves only the last counts."""
        if not self.fixed.value:
            return self.viewer.set_task(None)
        task = [
            min(max((slider.value - low) / (high - low), 0.0), 1.0)
            for slider, (low, high) in zip(self.sliders, self.ranges, strict=True)
        ]
        before = self.session.task
        if before is None or not torch.equal(before, torch.tensor(task, dtype=torch.float32)):
            self.viewer.set_task(task)


def task_ranges(env: Any) -> list[tuple[str, float, float, str]]:
    """Name, lower and upper bound, and unit of each element of the task vector: those of
    `env.parameters` where the environment declares them, else [0, 1]."""
    leaf = env.spec.task
    names = leaf.names or tuple(f"task {i}" for i in range(leaf.size))
    native = find_protocol(env, HasTaskParameters)
    known = {each.name: each for each in (() if native is None else native.parameters)}
    return [
        (name, known[name].low, known[name].high, known[name].unit)
        if name in known
        else (name, 0.0, 1.0, "")
        for name in names
    ]
