"""Viewer: the thread that steps the session and keeps the page in time with it.

Everything that touches the environment, the policy or a picture runs in this one thread; buttons
and callers hand it what to do.
"""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch
from viser import ViserServer
from viser._messages import ShareUrlRequest

from embodied.core.env import VecEnv
from embodied.viewer.launch import HOST, Run
from embodied.viewer.page import SPEEDS, Page
from embodied.viewer.session import Session, choices_for

Command = tuple[Callable[[], None], "Future[None]"]
CLOSED = "the viewer is closed"
REST = 0.8
"""How long the end of an episode is shown, s."""
FRAMES = 1 / 30


class Viewer:
    """A page on 127.0.0.1 and the session behind it; every method returns when it is done.

    Methods may be called from any thread. What goes wrong in them is raised here; what goes wrong
    while playing stops the play and is said on the page.
    """

    def __init__(self, env: VecEnv, run: Run | None = None, port: int = 8080, seed: int = 0):
        self.session = Session(env, *choices_for(env, run))
        self.playing, self.speed, self.problem = False, 1.0, ""
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closing, self._ended, self._due = threading.Event(), threading.Event(), 0.0
        # Browsers open connections that they do not use, each of which would be a traceback.
        logging.getLogger("websockets.server").setLevel(logging.CRITICAL)
        with contextlib.redirect_stdout(io.StringIO()):
            self.server = ViserServer(HOST, port, label="embodied", verbose=False)
        # The page could otherwise ask for a tunnel that shows it to the whole internet.
        self.server._websock_server.unregister_handler(ShareUrlRequest)
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(seed,), name="viewer", daemon=True)
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server.get_port()}"

    def play(self) -> None:
        """Go on in time, `speed` times as fast as the real thing."""
        self._do(self._play)

    def pause(self) -> None:
        """Stand still."""
        self._do(self._pause)

    def step(self, steps: int = 1) -> None:
        """Pause, and take `steps` control steps."""
        self._do(lambda: self._step(steps))

    def reset(self, seed: int | None = None) -> None:
        """Begin the running episode again, or the one of `seed`."""
        self._do(lambda: self._begin(self.session.episode.seed if seed is None else seed))

    def set_task(self, task: Sequence[float] | None) -> None:
        """Begin again with the task vector `task` [D] in [0, 1]; None: drawn for each episode."""
        self._do(lambda: self._set_task(task))

    def set_speed(self, speed: float) -> None:
        """How many simulated seconds pass in a second, 0.1 to 5."""
        low, high = SPEEDS
        if not low <= speed <= high:
            raise ValueError(f"speed is {speed}, it has to be between {low} and {high}")
        self._do(lambda: self._set_speed(speed))

    def choose(self, policy: str) -> None:
        """Let another policy act from here on, by its name in the page."""
        self._do(lambda: self._choose(policy))

    def explore(self, on: bool) -> None:
        """Whether the policy adds its exploration noise."""
        self._do(lambda: self._explore(on))

    def refresh(self) -> None:
        """Send everything that the page does not show yet."""
        self._do(lambda: self.page.refresh(force=True))

    def wait(self) -> None:
        """Serve until the viewer is closed from another thread, or Ctrl-C is pressed."""
        # Not `Thread.join`: Ctrl-C inside it can leave a running thread marked as ended (3.11).
        while not self._ended.wait(0.5):
            pass

    def close(self) -> None:
        """End the thread, the server and the environment; safe to call twice."""
        self._closing.set()
        self.ask(lambda: None)
        if self._thread is not threading.current_thread():
            self._thread.join()
        # The server announces its end on the terminal, whatever it was told.
        with contextlib.redirect_stdout(io.StringIO()):
            self.server.stop()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, command: Callable[[], None]) -> Future[None]:
        """Have `command` done in the viewer's thread, soon."""
        answer: Future[None] = Future()
        self._commands.put((command, answer))
        return answer

    def press(self, command: Callable[[], None]) -> None:
        """Like `ask`, for the page: what goes wrong is said there."""
        self.ask(lambda: self._guarded(command))

    def _do(self, command: Callable[[], None]) -> None:
        if self._thread is threading.current_thread():
            return command()
        answer = self.ask(command)
        while not wait([answer], timeout=0.5).done:
            if not self._thread.is_alive():
                raise RuntimeError(CLOSED)
        answer.result()

    def _run(self, seed: int) -> None:
        try:
            self.session.begin(seed)
            self.page = Page(self.server, self)
            self.page.refresh(force=True)
        except BaseException as error:  # handed to the thread that waits in __init__
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)
            self._serve()
        finally:
            self._refuse()
            self.session.env.close()
            self._ended.set()

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._obey(self._pause_length())
            if self.playing and time.monotonic() >= self._due:
                self._guarded(self._advance)
            self._guarded(self.page.refresh)

    def _pause_length(self) -> float:
        """How long to wait for a command, s: until something else is due."""
        if self.playing:
            return max(0.0, min(self._due - time.monotonic(), FRAMES))
        return FRAMES if self.page.stale else 0.5

    def _obey(self, timeout: float) -> None:
        """Do the commands that are there, waiting up to `timeout` s for the first."""
        with contextlib.suppress(queue.Empty):
            command, answer = self._commands.get(timeout=timeout) if timeout else self._next()
            while True:
                try:
                    command()
                except Exception as error:  # raised again where the command came from
                    answer.set_exception(error)
                else:
                    answer.set_result(None)
                command, answer = self._next()

    def _next(self) -> Command:
        return self._commands.get_nowait()

    def _refuse(self) -> None:
        """Nobody may wait for a thread that has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._next()[1].set_exception(RuntimeError(CLOSED))

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
        wait = REST if self.session.episode.end else self.session.env.spec.dt / self.speed
        self._due = max(self._due + wait, time.monotonic() - FRAMES)

    def _take(self) -> None:
        self.session.advance()
        if self.session.episode.steps == 0:
            self.page.begun()
        self.page.changed()

    def _begin(self, seed: int) -> None:
        self.session.begin(seed)
        self._due, self.problem = time.monotonic(), ""
        self.page.begun()
        self.page.changed()

    def _set_task(self, task: Sequence[float] | None) -> None:
        leaf, before = self.session.env.spec.task, self.session.task
        if task is not None and (leaf is None or len(task) != leaf.size):
            size = 0 if leaf is None else leaf.size
            raise ValueError(f"the task has {len(task)} elements, this environment's has {size}")
        self.session.task = None if task is None else torch.tensor(task, dtype=torch.float32)
        try:
            self._begin(self.session.episode.seed)
        except ValueError:
            self.session.task = before
            raise

    def _set_speed(self, speed: float) -> None:
        self.speed = speed
        self.page.changed()

    def _choose(self, policy: str) -> None:
        self.session.choose(policy)
        self.problem = ""
        self.page.changed()

    def _explore(self, on: bool) -> None:
        self.session.explore = on
        self.page.changed()
