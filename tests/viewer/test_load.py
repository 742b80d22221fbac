"""Many pages at once: what is sent from one thread reaches all of them, and stays of one size."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import threading
from collections.abc import Iterator

import msgspec
from websockets.sync.client import ClientConnection, connect

from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.viewer.panels.page import Viewer
from embodied.viewer.server.server import ThreadSafeEvent
from tests import toy_envs
from tests.viewer.browser import until
from tests.viewer.sessions import LIFT, alone
from tests.viewer.test_viewer import CAMERA, messages

PAGES = 10


@contextlib.contextmanager
def pages(viewer: Viewer, count: int) -> Iterator[list[ClientConnection]]:
    """Connections as browsers make them."""
    version = importlib.metadata.version("viser")
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(
                connect(
                    viewer.url.replace("http", "ws"),
                    subprotocols=[f"viser-v{version}"],
                    max_size=None,
                    open_timeout=60,
                )
            )
            for _ in range(count)
        ]
        for each in opened:
            each.send(msgspec.msgpack.encode(CAMERA.as_serializable_dict()))
        until(lambda: len(viewer.server.get_clients()) == count)
        yield opened


def test_another_thread_may_ring_while_many_wait() -> None:
    async def many() -> list[bool]:
        bell, loop = ThreadSafeEvent(), asyncio.get_running_loop()
        waiting = [asyncio.create_task(bell.wait()) for _ in range(5)]
        await asyncio.sleep(0)
        thread = threading.Thread(target=bell.set)
        thread.start()
        thread.join()
        # Seen at once, but those who wait are woken by their own thread only.
        before = [bell.is_set(), *(task.done() for task in waiting)]
        assert await asyncio.wait_for(bell.wait(), 1.0)
        loop.call_soon(bell.set)
        woken = await asyncio.gather(*waiting)
        bell.clear()
        return [*before, *woken, bell.is_set()]

    assert asyncio.run(many()) == [True, *[False] * 5, *[True] * 5, False]


def test_every_page_has_a_bell() -> None:
    with Viewer(alone(toy_envs.Reach(1)), port=0) as viewer, pages(viewer, 2):
        assert isinstance(
            viewer.server._websock_server._broadcast_buffer.message_event, ThreadSafeEvent
        )
        for state in viewer.server._websock_server._client_state_from_id.values():
            assert isinstance(state.message_buffer.message_event, ThreadSafeEvent)


def test_ten_pages_see_the_same_end() -> None:
    with (
        Viewer(alone(build(LIFT | {"horizon": 20}, VecEnv)), port=0, seed=3) as viewer,
        pages(viewer, PAGES) as opened,
    ):
        viewer.choose("demonstrator")
        viewer.step(19)
        viewer.refresh()
        hand = next(name for name in viewer.page.scene.names if name.endswith("_hand"))
        wanted = tuple(viewer.server.scene.get_handle_by_name(hand).position)
        for page in opened:
            last = None
            while last != wanted:
                for message in messages(page.recv(timeout=60)):
                    if message["type"] == "SetPositionMessage" and message["name"] == hand:
                        last = tuple(message["position"])
    assert viewer.problem == ""


def test_what_is_kept_for_new_pages_does_not_grow() -> None:
    with (
        Viewer(alone(build(LIFT | {"horizon": 8}, VecEnv)), port=0, seed=3) as viewer,
        pages(viewer, 1) as opened,
    ):
        viewer.choose("demonstrator")
        buffer = viewer.server._websock_server._broadcast_buffer
        threading.Thread(target=lambda: list(opened[0]), daemon=True).start()

        def episodes(count: int) -> tuple[int, int]:
            for _ in range(count * 9):
                viewer.step()
                viewer.refresh()
            until(lambda: len(buffer.generator_cursors) == 1)
            gc.collect()
            return len(buffer.message_from_id), len(viewer.server.scene._handle_from_node_name)

        first = episodes(2)
        later = episodes(6)
        assert later[1] == first[1] and later[0] <= first[0] + 30
