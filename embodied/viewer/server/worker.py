"""WorkerThread: a thread that runs submitted commands in order."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

Command = tuple[Callable[[], None], "Future[None]"]
CLOSED = "the viewer is closed"


class WorkerThread:
    """Runs `setup`, then `run_loop`, then `teardown` in a thread; `start` raises the errors of
    `setup`."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closing, self._ended = threading.Event(), threading.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="viewer", daemon=True)

    def setup(self) -> None:
        """Called first in the thread."""

    def run_loop(self) -> None:
        """The thread's loop, until `closing`; it calls `run_commands` regularly."""
        raise NotImplementedError

    def teardown(self) -> None:
        """Called last in the thread."""

    def start(self) -> None:
        """Start the thread; returns when `setup` is done."""
        self._thread.start()
        self._ready.result()

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def submit(self, command: Callable[[], None]) -> Future[None]:
        """Run `command` in the thread, soon."""
        answer: Future[None] = Future()
        self._commands.put((command, answer))
        return answer

    def call(self, command: Callable[[], None]) -> None:
        """Run `command` in the thread and wait for it; raises its errors."""
        if self._thread is threading.current_thread():
            return command()
        answer = self.submit(command)
        while not wait([answer], timeout=0.5).done:
            if not self._thread.is_alive():
                raise RuntimeError(CLOSED)
        answer.result()

    def wait(self) -> None:
        """Wait until the thread is stopped, or Ctrl-C is pressed."""
        # Not `Thread.join`: Ctrl-C inside it can leave a running thread marked as ended (3.11).
        while not self._ended.wait(0.5):
            pass

    def stop(self) -> None:
        """Stop the thread and wait for it; safe to call twice."""
        self._closing.set()
        self.submit(lambda: None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def run_commands(self, timeout: float) -> None:
        """Run the submitted commands, waiting up to `timeout` s for the first."""
        with contextlib.suppress(queue.Empty):
            command, answer = self._commands.get(timeout=timeout) if timeout else self._next()
            while True:
                try:
                    command()
                except Exception as error:  # raised again by `call`
                    answer.set_exception(error)
                else:
                    answer.set_result(None)
                command, answer = self._next()

    def _run(self) -> None:
        try:
            self.setup()
        except BaseException as error:  # raised by `start`
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)
            self.run_loop()
        finally:
            with contextlib.suppress(queue.Empty):
                while True:  # no caller waits for a stopped thread
                    self._next()[1].set_exception(RuntimeError(CLOSED))
            self.teardown()
            self._ended.set()

    def _next(self) -> Command:
        return self._commands.get_nowait()
