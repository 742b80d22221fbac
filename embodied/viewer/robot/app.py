"""RobotViewer: the monitoring page of a robot deployment: measured arm, plan, status, plots."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
from viser import Icon, ViserServer

from embodied.core.build import build, named_function
from embodied.embodiments.controller import Controller
from embodied.embodiments.kinematics.arm import is_arm_file
from embodied.embodiments.kinematics.from_mujoco import compile_spec, read_spec
from embodied.envs.fr3.base import compile_scene
from embodied.envs.hardware_sim.fr3_task import TaskWorld
from embodied.real_robot.assemble import forward_kinematics
from embodied.real_robot.daemon.client import ClientError, emergency_stop
from embodied.real_robot.deployment import Deployment
from embodied.real_robot.drivers.sim import World
from embodied.real_robot.kernel.arm_state import Floats
from embodied.real_robot.kernel.messages import Mode
from embodied.real_robot.policy.observer import APART, AXES, names_of
from embodied.viewer.panels.main_view import CHOSEN, GONE, Paths, segments
from embodied.viewer.panels.page import Parts, Refresh
from embodied.viewer.panels.plots import plot
from embodied.viewer.robot.monitor import ANSWER_TIMEOUT, RobotMonitor
from embodied.viewer.robot.words import (
    STYLE,
    headline,
    interventions,
    notes,
    plain,
    sentence,
    tables,
    tiles,
)
from embodied.viewer.run_folder import HOST
from embodied.viewer.scene.detect import HINGE, MujocoScene, PosedModel
from embodied.viewer.scene.types import Array, DecimatedScene, view_of
from embodied.viewer.scene.viser_scene import SceneCameras, ViserScene
from embodied.viewer.server.server import PageServer, PageThread, run_page

PLACE = re.compile(r"(.+)_x")
ARM_NAMES = ("tool", "lead")


# RobotArm: the 3D model of a deployed arm at its measured joints, and the tool path of its plan.
# The plan is the newest action chunk, converted to joint targets by the robot's controller, and to
# tool positions by its kinematics. Safety stages are not applied.
class RobotArm:
    """The model of a deployment's arm and of the objects before it.

    `model` is None if no 3D model of this arm is known; `missing` says so. `marks` are named
    positions that are not bodies of the model.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.model, self.missing = deployment, None, ""
        known = names_of(deployment.joints, deployment.given, deployment.sensed)
        self.where = {name: at for at, name in enumerate(known)}
        self.forward = forward_kinematics(deployment)
        self.controller = build(deployment.controller, Controller)
        model = model_of(deployment)
        bodies: set[str] = set()
        if model is None or int((model.jnt_type == HINGE).sum()) != deployment.joints:
            self.missing = f"no model of {deployment.robot}; only its tool position is shown"
        else:
            bodies = {model.body(i).name for i in range(model.nbody)}
            posed = PosedModel(model, mujoco.MjData(model), "state", self.where)
            mujoco.mj_forward(model, posed.data)
            self.posed = posed
            self.model = DecimatedScene(MujocoScene(lambda: (posed.model, posed.data)))
        self.marks = [name for name in places_in(self.where) if name not in bodies]

    def put(self, state: np.void) -> dict[str, Array]:
        """Pose the model by the measured state; returns the positions of `marks`, [3] each (m)."""
        given = self.deployment.given
        known = {f"q{i}": float(value) for i, value in enumerate(state["q"], 1)}
        known |= dict(zip(self.deployment.sensed, map(float, state["sensed"]), strict=True))
        known |= {"width": float(state["width"]), **given}
        values = torch.tensor([known.get(name, 0.0) for name in self.where], dtype=torch.float64)
        if self.model is not None and bool(torch.isfinite(values).all()):
            self.posed.put({"state": values})
        at = {name: np.array([known[f"{name}_{axis}"] for axis in AXES]) for name in self.marks}
        return {name: place for name, place in at.items() if np.isfinite(place).all()}

    def tool(self, state: np.void) -> Floats:
        return np.asarray(self.forward(np.asarray(state["q"])[None])[0])

    def plan(self, state: np.void, chunk: np.void | None) -> Array | None:
        """The tool path [K, 3] (m) from the measured pose through the remaining actions of the
        newest chunk; None if no actions remain."""
        if chunk is None:
            return None
        path = plan_joints(self.controller, self.deployment.step, state, chunk)
        if path is None:
            return None
        places = np.asarray(self.forward(path))
        return places if np.isfinite(places).all() else None


def plan_joints(
    controller: Controller, step: float, state: np.void, chunk: np.void
) -> Floats | None:
    """Joint positions [K, n]: the measured ones, then the targets of the chunk's remaining actions;
    None if there are none or they are not finite."""
    steps, size = int(chunk["steps"]), int(chunk["size"])
    at = max(0, int((float(state["now"]) - float(chunk["start"])) / step))
    # The last action is held for one step, as by the chunk follower.
    actions = chunk["actions"][min(at, steps - 1) : steps, :size].astype(np.float64)
    q, sent = (np.array(state[name], np.float64) for name in ("q", "sent"))
    if not steps or at > steps or not all(np.isfinite(each).all() for each in (actions, q, sent)):
        return None
    path, reference = [q], controller.begin(sent[None], np.array([float(state["width"])]))
    for action in actions:
        joints, _, reference = controller(action[None], path[-1][None], reference)
        path.append(joints[0])
    return np.stack(path)


def model_of(deployment: Deployment) -> mujoco.MjModel | None:
    """The MuJoCo model of the deployment's simulator, if there is one, else that of its kinematics
    module's `mjcf()`; None if there is none."""
    parts = (deployment.driver, deployment.emulator or {})
    node = next((dict(part["world"]) for part in parts if part.get("world")), None)
    if node is not None:
        made = build(node, World)
        # The simulation compiles its model without visual geoms.
        return (
            compile_scene(made.task, pictures=True)
            if isinstance(made, TaskWorld)
            else made.compile()
        )
    if is_arm_file(deployment.kinematics):
        file = deployment.driver.get("file")  # of a simulation of the arm's own file
        return None if file is None else compile_spec(read_spec(Path(file)), Path(file))
    module = sys.modules[named_function(deployment.kinematics, "kinematics").__module__]
    source = module.mjcf() if hasattr(module, "mjcf") else None
    if source is None:
        return None
    if isinstance(source, Path):
        spec = mujoco.MjSpec.from_file(str(source))
        spec.meshdir = str(source.parent / "meshes")
        return spec.compile()
    return mujoco.MjModel.from_xml_string(source)


def places_in(where: Mapping[str, int]) -> list[str]:
    """Names of objects whose x, y and z are known."""
    found = [match[1] for name in where if (match := PLACE.fullmatch(name))]
    return [
        name
        for name in found
        if name not in ARM_NAMES
        and not APART.fullmatch(f"{name}_x")
        and all(f"{name}_{axis}" in where for axis in AXES)
    ]


EVERY = 0.5  # s between two samples
KEPT = 240  # samples
TRAIL_POINTS, MOVED = 400, 2e-3  # places of the tool; m between two
PLOTS = ("rate (Hz)", "late (ms)", "missed ticks", "observation age (s)", "off target (rad)")


class RobotHistory:
    """The last two minutes of a deployment as curves: `add` every state message, plot `samples`.

    Counters (ticks, missed ticks, interventions) become rates between two samples; of the lateness
    the maximum in between is kept. `off target` is the largest joint distance between the sent
    target and the measurement.
    """

    def __init__(self, stages: Sequence[str]) -> None:
        self.stages = tuple(stages)
        self.samples: deque[dict[str, float]] = deque(maxlen=KEPT)
        self.tool: deque[Floats] = deque(maxlen=TRAIL_POINTS)
        self._first: np.void | None = None
        self._last: np.void | None = None
        self._late = 0.0
        self._mode = Mode.DISCONNECTED

    def add(self, state: np.void, chunk: np.void | None, tool: Floats | None) -> None:
        """Record `state`, the newest `chunk` and the tool position [3] (m), if known."""
        self._late = max(self._late, float(state["late"]))
        mode = Mode(int(state["mode"]))
        if mode != self._mode and mode == Mode.RUNNING:
            self.tool.clear()  # the path is that of one episode
        self._mode = mode
        if tool is not None and (not self.tool or np.abs(self.tool[-1] - tool).max() > MOVED):
            self.tool.append(tool)
        if self._first is None or self._last is None:
            self._first = self._last = state
        passed = float(state["now"]) - float(self._last["now"])
        if passed < EVERY:
            return
        ticks = int(state["tick"]) - int(self._last["tick"])
        acted = 100.0 * (state["counts"] - self._last["counts"]) / max(ticks, 1)
        self.samples.append(
            {
                "s": float(state["now"]) - float(self._first["now"]),
                "rate (Hz)": ticks / passed,
                "late (ms)": 1e3 * self._late,
                "missed ticks": float(state["missed"] - self._last["missed"]),
                "observation age (s)": np.nan
                if chunk is None
                else float(state["now"]) - float(chunk["seen"]),
                "off target (rad)": float(np.abs(state["sent"] - state["q"]).max()),
                **dict(zip(self.stages, map(float, acted), strict=True)),
            }
        )
        self._last, self._late = state, 0.0

    def curve(self, name: str) -> Floats:
        """The values [T] of one of PLOTS, of the time ("s", since the first state), or the share of
        ticks (%) in which a safety stage changed the target."""
        return np.array([sample[name] for sample in self.samples] or [np.nan])

    def trail(self) -> Floats | None:
        """The tool's path [K, 3] (m); None before it moved."""
        return np.stack(self.tool) if len(self.tool) > 1 else None


RADIUS = 0.012
PLAN, TRAIL = "/paths/plan", "/paths/trail"
LINES = {PLAN: (CHOSEN, 5.0), TRAIL: (GONE, 2.5)}
MARK, TOOL = (22, 163, 74), (213, 94, 0)


class RobotPage(Parts):
    """`show_deployment` for every new deployment, `changed` after a tick, `refresh` often."""

    def __init__(self, server: ViserServer, monitor: RobotMonitor) -> None:
        self.server, self.monitor = server, monitor
        self.cameras = SceneCameras(server)
        self.arm: RobotArm | None = None
        self.history, self.scene = RobotHistory(()), None
        self.plots: dict[str, Any] = {}
        self.paths = Paths(server)
        self.marks: dict[str, Any] = {}
        self.missing = ""
        gui = server.gui
        gui.add_html(STYLE)
        self.stop = gui.add_button(
            "Emergency stop", color="red", icon=Icon.HAND_STOP, hint="no reset from here"
        )
        self.stop.on_click(lambda _: self._stop())
        self.stopped, self.head, self.tiles = (gui.add_html("") for _ in range(3))
        self.curves: Any = None
        with gui.add_folder("Details", expand_by_default=False):
            self.tables = gui.add_html("")
        self.acted: list[str] = []  # the stages in the plot of interventions, if there is one
        self.interventions: Any = None
        panel = gui.add_panel()
        with panel.add_tab("Notes"):
            self.notes = gui.add_html("")
        self.parts = [
            Refresh(self._draw_scene, 1 / 25, share=0.3),
            Refresh(self._draw_paths, 0.1),
            Refresh(self._draw_words, 0.25),
            Refresh(self._draw_plots, 0.5),
        ]

    def show_deployment(self) -> None:
        about = self.monitor.deployment
        assert about is not None
        self.history, self.arm, self.missing = RobotHistory(self.monitor.stages), None, ""
        if self.curves is not None:
            self.curves.remove()
        self.curves = self.server.gui.add_folder("Last two minutes")
        self.acted, self.interventions = [], None
        with self.curves:
            self.plots = {name: plot(self.server, name, [name], 110, None) for name in PLOTS}
        if self.scene is not None:
            self.scene.root.remove()
        self.paths.show({})
        for mark in self.marks.values():
            mark.remove()
        self.scene, self.marks = None, {}
        try:
            self.arm = RobotArm(about)
        except Exception as error:  # whatever a robot's own files raise; the numbers are shown
            self.missing = f"the arm cannot be drawn: {str(error) or type(error).__name__}"
        else:
            self.missing = self.arm.missing

    def add(self) -> None:
        state = self.monitor.state
        if state is not None:
            tool = None if self.arm is None else self.arm.tool(state)
            self.history.add(state, self.monitor.chunk, tool)

    def words(self) -> str:
        parts = (self.stopped, self.head, self.tiles, self.tables, self.notes)
        return plain("\n".join(part.content for part in parts))

    def _stop(self) -> None:
        """Press the emergency stop, in a thread of the server's own."""
        try:
            said = emergency_stop(self.monitor.folder, ANSWER_TIMEOUT).line()
        except ClientError as error:
            said = str(error)
        self.stopped.content = sentence(f"emergency stop: {said}", bad=True)

    def _draw_scene(self) -> None:
        state, arm = self.monitor.state, self.arm
        if state is None or arm is None:
            return
        marks = arm.put(state)
        if arm.model is None:
            marks["tool"] = arm.tool(state)
        if self.scene is None and arm.model is not None:
            self.scene = ViserScene(self.server, arm.model)
            eye = arm.model.viewpoint()
            if np.linalg.norm(eye.place - eye.target) > 3.0:
                eye = view_of(arm.model.poses()[0][1:])
            self.cameras.set(eye)
        elif self.scene is not None and arm.model is not None:
            self.scene.show(*arm.model.poses())
        for name, place in marks.items():
            if name in self.marks:
                self.marks[name].position = place
                continue
            node, colour = f"/marks/{name.replace('/', '.')}", TOOL if name == "tool" else MARK
            self.marks[name] = self.server.scene.add_icosphere(
                node, radius=RADIUS, color=colour, position=place
            )

    def _draw_paths(self) -> None:
        state, arm = self.monitor.state, self.arm
        if state is None or arm is None:
            return
        plan = arm.plan(state, self.monitor.chunk) if self.monitor.alive else None
        self.paths.show(
            {
                name: (segments([path]), *LINES[name])
                for name, path in {PLAN: plan, TRAIL: self.history.trail()}.items()
                if path is not None and len(path) > 1
            }
        )

    def _draw_words(self) -> None:
        self.head.content = headline(self.monitor) + sentence(self.missing)
        self.tiles.content = tiles(self.monitor, self.history.curve(PLOTS[0])[-1])
        self.tables.content = tables(self.monitor)
        self.notes.content = notes(self.monitor)

    def _draw_plots(self) -> None:
        if not self.history.samples or self.curves is None:
            return
        times, acted = self.history.curve("s"), list(interventions(self.monitor))
        if acted != self.acted:
            self.acted = acted
            if self.interventions is not None:
                self.interventions.remove()
            with self.curves:
                title = "interventions (% of ticks)"
                self.interventions = plot(self.server, title, acted, 150, None)
        if self.interventions is not None:
            self.interventions.data = (times, *map(self.history.curve, acted))
        for name, handle in self.plots.items():
            handle.data = (times, self.history.curve(name))


POLL, POLL_IDLE = 1 / 25, 0.2  # s between two polls, with and without an open page
QUERY = 0.5  # s between two status requests to the daemon


class RobotViewer(PageThread):
    """Monitors the deployment in `folder` (None: the only one in a default folder), and its
    successors, from a thread. Nothing of it is written but its emergency stop."""

    def __init__(
        self,
        folder: Path | None,
        port: int = 8080,
        host: str = HOST,
        page_server: PageServer | None = None,
    ) -> None:
        super().__init__(PageServer(host, port) if page_server is None else page_server)
        self.monitor = RobotMonitor(folder)
        self._number, self._query_at = 0, 0.0
        self.start()

    def refresh(self) -> None:
        """Poll, and send everything that the page does not show yet."""
        self.call(lambda: self._update(force=True))

    def words(self) -> str:
        text: list[str] = []
        self.call(lambda: text.append(self.page.words()))
        return text[0]

    def setup(self) -> None:
        # The other cores are for the deployment.
        torch.set_num_threads(1)
        self.page = RobotPage(self.server, self.monitor)
        self._update(force=True)

    def run_loop(self) -> None:
        while not self.closing:
            self.run_commands(POLL if self.server.get_clients() else POLL_IDLE)
            self._update()

    def teardown(self) -> None:
        self.monitor.close()

    def _update(self, force: bool = False) -> None:
        new, now = self.monitor.poll(), time.monotonic()
        if force or now >= self._query_at:
            self._query_at = now + QUERY
            self.monitor.query_daemon()
        if self.monitor.number != self._number:
            self._number = self.monitor.number
            self.page.show_deployment()
        if new:
            self.page.add()
        self.page.changed()
        self.page.refresh(force)


def monitor(
    folder: Path | None = None, port: int = 8080, host: str = HOST, block: bool = True
) -> RobotViewer:
    """Open the monitoring page for the deployment in `folder` (None: the only one in the default
    folders of `embodied deploy`), running or not yet started. `port`, `host` and `block` as in
    `serve`. Raises ViewerError; FolderError where several run."""
    from embodied.real_robot.daemon.server import find
    from embodied.viewer.launch import require_port, require_viser

    require_port(port, host)
    require_viser()
    place = find() if folder is None else folder
    page_server = PageServer(host, port)
    print(f"monitoring {place} at {page_server.url} (Ctrl-C ends it, not the robot)", flush=True)
    return run_page(
        page_server, lambda page_server: RobotViewer(folder, page_server=page_server), block
    )
