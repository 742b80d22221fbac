"""Restarts and replaces processes beside the main loop of the daemon: each takes several polls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from embodied.real_robot.daemon.commands import Answer
from embodied.real_robot.daemon.processes import Processes
from embodied.real_robot.daemon.requests import Request
from embodied.real_robot.daemon.server import Client


class Restarts:
    """`poll` often. One at a time; who asks meanwhile is refused.

    `start`: starts all processes. `policy_started`: called with a note (empty: none) when another
    policy process is there.
    """

    def __init__(
        self,
        processes: Processes,
        answer: Answer,
        start: Callable[[], None],
        policy_started: Callable[[str], None],
    ) -> None:
        self.processes = processes
        self.answer = answer
        self.start = start
        self.policy_started = policy_started
        self._task: Iterator[None] | None = None
        self._loading: tuple[Client, Request] | None = None

    @property
    def busy(self) -> bool:
        """Whether a restart is under way."""
        return self._task is not None

    def poll(self) -> None:
        """Go on with what is under way."""
        if self._task is None:
            self._poll_hot_swap()
        elif next(self._task, self) is self:
            self._task = None

    def restart_all(self, client: Client, request: Request) -> None:
        """The robot's processes anew, after the control process died."""
        self._begin(self._restart_all, client, request)

    def restart_policy(
        self, client: Client, request: Request, then: Callable[[Client, Request], None]
    ) -> None:
        """The policy process anew; `then` answers."""

        def restart(client: Client, request: Request) -> Iterator[None]:
            yield from self.processes.restart_policy()
            self.policy_started("")
            then(client, request)

        self._begin(restart, client, request)

    def load(self, client: Client, request: Request) -> None:
        """Start the policy that the request names beside the one that acts; it takes over when it
        is ready."""
        if self.processes.hot_swap.child is not None:
            self.answer(client, request, False, "another policy is being loaded; wait for it")
            return
        self.processes.hot_swap.start(request.policy, self.processes.policy)
        self._loading = (client, request)

    def _begin(
        self, restart: Callable[[Client, Request], Iterator[None]], client: Client, request: Request
    ) -> None:
        if self._task is not None:
            self.answer(client, request, False, "processes are being started; wait for them")
        else:
            self._task = restart(client, request)

    def _restart_all(self, client: Client, request: Request) -> Iterator[None]:
        yield from self.processes.end_all()
        self.start()
        self.answer(client, request, True, "starting the arm's processes again")

    def _poll_hot_swap(self) -> None:
        """Swap to the policy that should take over, once it is ready."""
        if self.processes.hot_swap.child is None:
            return
        problem = self.processes.hot_swap.poll()
        if problem == "":
            self._task = self._swap_policy()
        elif problem is not None:
            self._loaded(problem)

    def _swap_policy(self) -> Iterator[None]:
        try:
            yield from self.processes.swap_policy()
        except OSError as error:
            self.processes.hot_swap.cancel()
            self._loaded(f"{error}; the one before goes on")
            return
        self.policy_started(f"the policy is now {self.processes.deployment.policy}")
        self._loaded("")

    def _loaded(self, problem: str) -> None:
        if self._loading is not None:
            self.answer(*self._loading, not problem, problem)
        self._loading = None
