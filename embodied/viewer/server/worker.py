"""Worker: one thread that does what others hand it, in order."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

Command = tuple[Callable[[], None], "Future[None]"]
CLOSED = "the viewer is closed"


class Worker:
    """`begin` and then `serve` run in the thread until `close`; what goes wrong in `begin` is
    raised by `start`."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._closing, self._ended = threading.Event(), threading.Event()
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="viewer", daemon=True)

    def begin(self) -> None:
        """The first thing that the thread does."""

    def serve(self) -> None:
        """What the thread does until `closing`; it calls `obey` now and then."""
        raise NotImplementedError

    def end(self) -> None:
        """The last thing that the thread does."""

    def start(self) -> None:
        """Begin; returns when `begin` is done."""
        self._thread.start()
        self._ready.result()

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def ask(self, command: Callable[[], None]) -> Future[None]:
        """Have `command` done in the thread, soon."""
        answer: Future[None] = Future()
        self._commands.put((command, answer))
        return answer

    def do(self, command: Callable[[], None]) -> None:
        """Have `command` done in the thread; what goes wrong in it is raised here."""
        if self._thread is threading.current_thread():
            return command()
        answer = self.ask(command)
        while not wait([answer], timeout=0.5).done:
            if not self._thread.is_alive():
                raise RuntimeError(CLOSED)
        answer.result()

    def wait(self) -> None:
        """Until the thread is ended from another one, or Ctrl-C is pressed."""
        # Not `Thread.join`: Ctrl-C inside it can leave a running thread marked as ended (3.11).
        while not self._ended.wait(0.5):
            pass

    def stop(self) -> None:
        """End the thread and wait for it; safe to call twice."""
        self._closing.set()
        self.ask(lambda: None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def obey(self, timeout: float) -> None:
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

    def _run(self) -> None:
        try:
            self.begin()
        except BaseException as error:  # handed to the thread that waits in `start`
            self._ready.set_exception(error)
        else:
            self._ready.set_result(None)
            self.serve()
        finally:
            self._refuse()
            self.end()
            self._ended.set()

    def _next(self) -> Command:
        return self._commands.get_nowait()

    def _refuse(self) -> None:
        """Nobody may wait for a thread that has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._next()[1].set_exception(RuntimeError(CLOSED))
