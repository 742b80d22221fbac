"""Viewer: the thread that steps the session and keeps the page in time with it.

Everything that touches the environment, the policy or a picture runs in this one thread; buttons
and callers hand it what to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from embodied.viewer.panels.page import SPEEDS, Page
from embodied.viewer.run_folder import ViewerError
from embodied.viewer.scene.types import Array
from embodied.viewer.server.auth_proxy import HOST
from embodied.viewer.server.page_thread import Served
from embodied.viewer.server.server import Door
from embodied.viewer.session.disturbances import ROBOT
from embodied.viewer.session.player import Player
from embodied.viewer.session.session import Session

REST = 0.8
"""How long the end of an episode is shown, s."""
FRAMES = 1 / 30


class Viewer(Served):
    """A page and the session behind it; every method returns when it is done.

    It is on this machine only, unless `host` is another address; then the page asks for the token
    that is in `url`. A `door` that is open already is taken instead.

    Methods may be called from any thread. What goes wrong in them is raised here; what goes wrong
    while playing stops the play and is said on the page.
    """

    def __init__(
        self,
        session: Session,
        port: int = 8080,
        seed: int = 0,
        host: str = HOST,
        door: Door | None = None,
    ) -> None:
        super().__init__(Door(host, port) if door is None else door)
        self.session = session
        self.playing, self.speed, self.problem = False, 1.0, ""
        self._due, self._seed = 0.0, seed
        self._still: bool | None = None  # while something is held: whether time stood still before
        self.start()

    @property
    def share(self) -> float:
        """How far, while it plays, the time is between the moment before and the one that is looked
        at: 0 to 1."""
        length = self.session.spec.dt / self.speed
        if not self.playing or self.session.at == 0:
            return 1.0
        return min(max(1.0 - (self._due - time.monotonic()) / length, 0.0), 1.0)

    def play(self) -> None:
        """Go on in time, `speed` times as fast as the real thing."""
        self.do(self._play)

    def pause(self) -> None:
        """Stand still."""
        self.do(self._pause)

    def toggle(self) -> None:
        """Play, or pause if it plays."""
        self.do(lambda: self._pause() if self.playing else self._play())

    def step(self, steps: int = 1) -> None:
        """Pause, and go on by `steps` moments: those that are kept, then new control steps."""
        self.do(lambda: self._step(steps))

    def back(self, steps: int = 1) -> None:
        """Pause, and look at what was `steps` moments ago."""
        self.do(lambda: self._seek(self.session.at - steps))

    def scrub(self, step: int) -> None:
        """Pause, and look at the moment after `step` control steps."""
        first = self.session.episode.moments[0].step
        self.do(lambda: self._seek(step - first))

    def newest(self) -> None:
        """Look at the newest moment, from which playing goes on."""
        self.do(lambda: self._seek(self.session.length - 1))

    def branch(self) -> None:
        """Forget what came after the moment that is looked at, and go on from there."""
        self.do(lambda: self._then(self.session.branch))

    def next(self) -> None:
        """Begin the episode of the next seed."""
        self.do(lambda: self._begin(self.session.episode.seed + 1))

    def reset(self, seed: int | None = None) -> None:
        """Begin the running episode again, or the one of `seed`."""
        self.do(lambda: self._begin(self.session.episode.seed if seed is None else seed))

    def set_task(self, task: Sequence[float] | None) -> None:
        """Begin again with the task vector `task` [D] in [0, 1]; None: drawn for each episode."""
        self.do(lambda: self._retask(task))

    def set_speed(self, speed: float) -> None:
        """How many simulated seconds pass in a second, 0.1 to 5."""
        low, high = SPEEDS
        if not low <= speed <= high:
            raise ValueError(f"speed is {speed}, it has to be between {low} and {high}")
        self.do(lambda: self._set_speed(speed))

    def choose(self, policy: str) -> None:
        """Let another policy act from here on, by its name in the page."""
        self.do(lambda: self._then(lambda: self.session.choose(policy)))

    def other_checkpoint(self, by: int) -> None:
        """The run's next checkpoint, or the one before (`by` -1)."""
        if self.page.checkpoints is not None:
            self.page.checkpoints.move(self.session.chosen, by)

    def push(self, name: str, strength: float = 1.0) -> None:
        """Push a body, or "robot", by a velocity (m/s, rad/s), at the newest moment."""
        self.do(lambda: self._then(lambda: self.session.push_all(name, strength)))

    def shove(self, player: Player, link: str, way: Array, strength: float = 1.0) -> None:
        """Push a link of the robot of `player` along `way` [3], at the newest moment."""
        self.do(lambda: self._then(lambda: self.session.push_one(player, link, strength, way)))

    def hold(self, player: Player, name: str, place: Array) -> None:
        """Pull a free body in the world of `player` towards `place` [3] (m) from here on; time goes
        on while it is held."""
        self.do(lambda: self._hold(player, name, place))

    def let_go(self, player: Player) -> None:
        """Pull no more; what stood still before stands still again."""
        self.do(lambda: self._let_go(player))

    def blind(self, late: int = 0, off: Iterable[str] = ()) -> None:
        """Let who acts see the world `late` steps ago, and nothing of the observations `off`."""
        self.do(lambda: self._then(lambda: self.session.blind(late, set(off))))

    def explore(self, on: bool) -> None:
        """Whether the policy adds its exploration noise."""
        self.do(lambda: self._then(lambda: self.session.venture(on)))

    def refresh(self) -> None:
        """Send everything that the page does not show yet."""
        self.do(lambda: self.page.refresh(force=True))

    def redraw(self) -> None:
        """Mark every part of the page as stale."""
        self.page.changed()

    def press(self, command: Callable[[], None]) -> None:
        """Like `ask`, for the page: what goes wrong is said there."""
        self.ask(lambda: self._guarded(command))

    def begin(self) -> None:
        self.session.begin(self._seed)
        self.door.ready()
        self.page = Page(self.server, self)
        self.page.refresh(force=True)

    def end(self) -> None:
        self.session.close()

    def serve(self) -> None:
        self._meet_judge()
        while not self.closing:
            self.obey(self._pause_length())
            if self.playing and time.monotonic() >= self._due:
                self._guarded(self._advance)
            self._guarded(self.page.refresh)

    def _meet_judge(self) -> None:
        """Now that there is something to see."""
        if self.session.judge_later is not None:
            self.door.say("critic and reward")
            self._guarded(self.session.meet_judge)
            self.door.ready()
            self.page.changed()

    def _pause_length(self) -> float:
        """How long to wait for a command, s: until something else is due."""
        due = min(self._due, self.page.due) if self.playing else self.page.due
        return max(0.0, min(due - time.monotonic(), 0.5))

    def _guarded(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception as error:  # said on the page, whatever an environment or a policy raises
            self.playing, self.problem = False, str(error) or type(error).__name__
            self.page.changed()

    def _play(self) -> None:
        self.playing, self._due, self.problem = True, time.monotonic(), ""
        self.page.changed()

    def _pause(self) -> None:
        self.playing = False
        self.page.changed()

    def _step(self, steps: int) -> None:
        self.playing, self.problem = False, ""
        for _ in range(steps):
            self._take()

    def _advance(self) -> None:
        """Take a step, and set when the next one is due (behind, if the machine is too slow)."""
        self._take()
        session = self.session
        wait = REST if session.live and session.over else session.spec.dt / self.speed
        self._due = max(self._due + wait, time.monotonic() - FRAMES)

    def _take(self) -> None:
        self.session.advance()
        if self.session.at == 0:
            self.page.begun()
        self.page.changed()

    def _seek(self, at: int) -> None:
        self.playing = False
        self.session.seek(at)
        self.page.changed()

    def _begin(self, seed: int) -> None:
        self.session.begin(seed)
        self._due, self.problem = time.monotonic(), ""
        self.page.begun()
        self.page.changed()

    def _retask(self, task: Sequence[float] | None) -> None:
        self.session.set_task(task)
        self._begin(self.session.episode.seed)

    def _hold(self, player: Player, name: str, place: Array) -> None:
        if name not in player.pushes.names or name == ROBOT:
            raise ViewerError(f"{name} cannot be pulled here")
        if self._still is None:
            self.session.seek(self.session.length - 1)
            self._still = not self.playing
        player.held = (name, place)
        if not self.playing:
            self._play()

    def _let_go(self, player: Player) -> None:
        player.held = None
        if self._still:
            self._pause()
        self._still = None

    def _set_speed(self, speed: float) -> None:
        self.speed = speed
        self.page.changed()

    def _then(self, change: Callable[[], None]) -> None:
        """Do `change`, which is another setting: what stopped the play before may be past."""
        change()
        self.problem = ""
        self.page.changed()
