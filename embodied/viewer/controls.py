"""Controls: the thread that steps the session and keeps the page up to date.

Everything that touches the environment, the policy or rendering runs in this one thread; buttons
and callers hand it commands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from embodied.viewer.run_folder import HOST, ViewerError
from embodied.viewer.scene.types import Array
from embodied.viewer.server.server import PageServer, PageThread
from embodied.viewer.session.disturbances import ROBOT
from embodied.viewer.session.session import Session

SPEEDS = (0.1, 5.0)
FRAME = 1 / 30


Method = TypeVar("Method", bound=Callable[..., None])


def command(method: Method) -> Method:
    """A method of Controls that runs in the thread, and clears the error that stopped playback; the
    caller waits and gets its errors."""

    @wraps(method)
    def called(self: Controls, *args: Any, **settings: Any) -> None:
        def run() -> None:
            method(self, *args, **settings)
            self.problem = ""
            self.page.changed()

        self.call(run)

    return cast(Method, called)


class Controls(PageThread):
    """The session and what can be done with it; every method returns when its command is done.

    Panels of the page, which the subclass `Viewer` makes, hand every change to `press` or `bind`.
    `problem` is the error that stopped playback, empty if none.

    Methods may be called from any thread and raise the errors of their commands. Errors during
    playback stop it and are shown on the page.
    """

    page: Any  # the `Page`, whose panels import this class

    def __init__(
        self,
        session: Session,
        port: int = 8080,
        seed: int = 0,
        host: str = HOST,
        page_server: PageServer | None = None,
    ) -> None:
        super().__init__(PageServer(host, port) if page_server is None else page_server)
        self.session = session
        self.playing, self.speed, self.problem = False, 1.0, ""
        self._due, self._seed = 0.0, seed
        self._was_paused: bool | None = None  # before a body was dragged
        self.start()

    @property
    def share(self) -> float:
        """How far, while it plays, the display is between the previous step and the current one: 0
        to 1."""
        length = self.session.spec.dt / self.speed
        if not self.playing or self.session.at == 0:
            return 1.0
        return min(max(1.0 - (self._due - time.monotonic()) / length, 0.0), 1.0)

    @command
    def play(self) -> None:
        """Play at `speed` times real time; at the end of an episode, the next one."""
        self.playing, self._due = True, time.monotonic()

    @command
    def pause(self) -> None:
        """Stop playing."""
        self.playing = False

    @command
    def toggle(self) -> None:
        """Play if paused, pause if playing."""
        if self.playing:
            self.pause()
        else:
            self.play()

    @command
    def step(self, steps: int = 1) -> None:
        """Pause and go forward `steps` steps: stored ones, then new control steps."""
        self.playing = False
        for _ in range(steps):
            self._advance_session()

    def back(self, steps: int = 1) -> None:
        """Pause and go back `steps` steps."""
        self._seek(lambda: self.session.at - steps)

    def scrub(self, step: int) -> None:
        """Pause and display control step number `step`."""
        self._seek(lambda: step - self.session.episode.moments[0].step)

    def newest(self) -> None:
        """Display the newest step, from which playing continues."""
        self._seek(lambda: self.session.length - 1)

    @command
    def branch(self) -> None:
        """Discard the steps after the displayed one and continue from there."""
        self.session.branch()

    @command
    def next(self) -> None:
        """Start the episode of the next seed."""
        self.reset(self.session.episode.seed + 1)

    @command
    def reset(self, seed: int | None = None) -> None:
        """Restart the running episode, or start the one of `seed`."""
        self.session.reset(self.session.episode.seed if seed is None else seed)
        self._due = time.monotonic()
        self.page.episode_started()

    @command
    def set_task(self, task: Sequence[float] | None) -> None:
        """Restart with the task vector `task` [D] in [0, 1]; None: sampled for each episode."""
        self.session.set_task(task)
        self.reset()

    @command
    def set_speed(self, speed: float) -> None:
        """Simulated seconds per second, 0.1 to 5."""
        low, high = SPEEDS
        if not low <= speed <= high:
            raise ValueError(f"speed={speed} must be between {low} and {high}")
        self.speed = speed

    @command
    def choose(self, policy: str) -> None:
        """Switch to another policy, by its name on the page."""
        self.session.choose(policy)

    def other_checkpoint(self, by: int) -> None:
        """Switch to the run's next checkpoint, or the previous one (`by` -1)."""
        if self.page.checkpoints is not None:
            self.page.checkpoints.move(self.session.chosen, by)

    @command
    def push(self, name: str, strength: float = 1.0) -> None:
        """Push a body, or "robot", by a velocity (m/s, rad/s), at the newest step."""
        self.session.seek(self.session.length - 1)
        for each in self.session.sessions:
            if not each.episode.end or self.session.over:
                each.push(name, strength)

    @command
    def shove(self, player: Session, link: str, way: Array, strength: float = 1.0) -> None:
        """Push a link of the robot of `player` along `way` [3], at the newest step."""
        self.session.seek(self.session.length - 1)
        player.push(link, strength, way)

    @command
    def hold(self, player: Session, name: str, place: Array) -> None:
        """Pull a free body of `player` towards `place` [3] (m) from now on; it plays while the body
        is held."""
        if name not in player.pushes.names or name == ROBOT:
            raise ViewerError(f"{name} cannot be dragged: it is not a free body")
        if self._was_paused is None:
            self.session.seek(self.session.length - 1)
            self._was_paused = not self.playing
        player.held = (name, place)
        if not self.playing:
            self.play()

    @command
    def let_go(self, player: Session) -> None:
        """Stop pulling; pauses again if it was paused before."""
        player.held = None
        if self._was_paused:
            self.pause()
        self._was_paused = None

    @command
    def disturb_observations(self, late: int = 0, off: Iterable[str] = ()) -> None:
        """Give the policy observations that are `late` steps old and zeros for the observations
        `off`."""
        for each in self.session.sessions:
            each.disturbance.late, each.disturbance.off = late, set(off)

    @command
    def explore(self, on: bool) -> None:
        """Whether the policy adds its exploration noise."""
        for each in self.session.sessions:
            each.explore = on

    def refresh(self) -> None:
        """Send everything that the page does not show yet."""
        self.call(lambda: self.page.refresh(force=True))

    def press(self, command: Callable[[], None]) -> None:
        """Submit a command from the page; its errors are shown there."""
        self.submit(lambda: self._guarded(command))

    def bind(self, control: Any, action: Callable[[Any], None]) -> None:
        """Hand the value of a control of the page to `action`, in the thread, when a user changes
        it."""

        async def changed(event: Any) -> None:
            # Read now, on the server's thread: a refresh may write the old value back at any time.
            # Values set by the program also arrive here, without a client.
            value = control.value
            if event.client_id is not None:
                self.press(lambda: action(value))

        control.on_update(changed)

    def setup(self) -> None:
        self.session.reset(self._seed)
        self.page_server.clear_loading()

    def teardown(self) -> None:
        self.session.close()

    def run_loop(self) -> None:
        if self.session.make_overlay is not None:  # after the first image
            self.page_server.show_loading("critic and reward")
            self._guarded(self.session.load_critic)
            self.page_server.clear_loading()
            self.page.changed()
        while not self.closing:
            due = min(self._due, self.page.due) if self.playing else self.page.due
            self.run_commands(max(0.0, min(due - time.monotonic(), 0.5)))
            if self.playing and time.monotonic() >= self._due:
                self._guarded(self._advance)
            self._guarded(self.page.refresh)

    def _guarded(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception as error:  # shown on the page, whatever an environment or a policy raises
            self.playing, self.problem = False, str(error) or type(error).__name__
            self.page.changed()

    def _advance(self) -> None:
        """Take a step and set when the next one is due (later, if the machine is too slow); the
        end of an episode stays until the next one is asked for."""
        self._advance_session()
        if self.session.live and self.session.over:
            self.playing = False
        self._due = max(self._due + self.session.spec.dt / self.speed, time.monotonic() - FRAME)

    def _advance_session(self) -> None:
        self.session.advance()
        if self.session.at == 0:
            self.page.episode_started()
        self.page.changed()

    @command
    def _seek(self, at: Callable[[], int]) -> None:
        self.playing = False
        self.session.seek(at())
