"""The page and what it exports in a real browser: it opens, plays, scrubs, and is laid out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from embodied.viewer import serve
from embodied.viewer.export.export import export
from embodied.viewer.launch import open_session
from embodied.viewer.panels.page import Viewer
from embodied.viewer.scene.viser_scene import COVERED, fitted
from embodied.viewer.server.server import PageServer
from tests.builders import run_folder
from tests.tiers import only_all
from tests.viewer.browser import Browser, program, until
from tests.viewer.sessions import FLOW, LIFT, SEVERAL, alone

pytestmark = pytest.mark.skipif(program() is None, reason="there is no Chromium (Debian: chromium)")

WORLD = SEVERAL | {"horizon": 20}
WIDE, PHONE = (1100, 720), (390, 760)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return run_folder(tmp_path_factory.mktemp("clone"), WORLD, FLOW, steps=(10, 20))


@pytest.fixture(scope="module")
def replay(run: Path, tmp_path_factory) -> Iterator[Browser]:
    """A replay of two policies, open in a browser."""
    session = open_session(run, None, "demonstrator")
    file = export(session, tmp_path_factory.mktemp("page") / "replay.html", seed=1)
    session.close()
    with Browser(f"file://{file}", WIDE) as browser:
        browser.wait("!!window.replay")
        yield browser


def box(browser: Browser, what: str) -> tuple[float, float, float, float]:
    """Left, top, width and height of an element."""
    code = f"(() => {{ const b = document.querySelector('{what}').getBoundingClientRect(); "
    return tuple(browser.run(code + "return [b.left, b.top, b.width, b.height]; })()"))


def drawn(browser: Browser) -> bool:
    return browser.picture()[100:600, 320:680].std() > 8


def seek(browser: Browser, step: int) -> None:
    browser.run(f"replay.play(false); replay.seek({step})")
    browser.wait("!replay.state.stale")


def test_a_replay_draws_both_and_moves(replay: Browser) -> None:
    replay.resize(*WIDE)
    seek(replay, 0)
    before = replay.picture()
    assert "demonstrator" in replay.words() and "· checkpoint 00000020" in replay.words()
    left, top, wide, high = box(replay, "#view")
    middle = before[int(top) + 40 : int(top + high) - 40, int(left) : int(left + wide)]
    for half in (middle[:, : int(wide) // 2], middle[:, int(wide) // 2 :]):
        # An arm, a table and a red cube: many colours, and red among them.
        assert half.std() > 20
        red, green = half[..., 0].astype(int), half[..., 1].astype(int)
        assert (red - green > 90).sum() > 60
    seek(replay, 12)
    after = replay.picture()
    assert np.mean(np.abs(after.astype(int) - before.astype(int)).max(2) > 30) > 0.01
    assert "step 12 of 20" in replay.words()
    assert replay.said == []


def test_keys_play_step_and_end_it(replay: Browser) -> None:
    seek(replay, 5)
    for key, step in (("right", 6), ("left", 5), ("left", 4), ("home", 0)):
        replay.press(key)
        assert replay.run("replay.state.time") == step
    replay.press("space")
    replay.wait("replay.state.playing && replay.state.time > 1")
    replay.press("space")
    assert not replay.run("replay.state.playing")
    replay.press("end")
    assert replay.run("replay.state.time === replay.last")


@only_all
def test_the_slider_and_the_mouse_reach_it(replay: Browser) -> None:
    replay.resize(*WIDE)
    seek(replay, 0)
    left, top, wide, high = box(replay, "#scrub")
    y = top + high / 2
    replay.drag((left + 8, y), (left + wide / 2, y))
    assert replay.run("replay.state.time") == pytest.approx(10, abs=1)
    replay.wait("!replay.state.stale")
    before = replay.picture()
    left, top, wide, high = box(replay, "#view")
    x, y = left + wide / 4, top + high / 2
    replay.drag((x, y), (x + 60, y), (x + 120, y + 10))
    replay.wait("!replay.state.stale")
    assert np.mean(replay.picture() != before) > 0.05


def test_it_fits_a_phone(replay: Browser) -> None:
    replay.resize(*PHONE, mobile=True)
    seek(replay, 8)
    assert replay.run("document.documentElement.scrollWidth") <= PHONE[0]
    for what in ("#view", "#bar", "#scrub", "#charts figure"):
        left, _, wide, high = box(replay, what)
        assert left >= 0 and left + wide <= PHONE[0] + 1 and wide > 120 and high > 20
    assert box(replay, "#bar")[1] < PHONE[1]
    picture = replay.picture()
    assert picture.shape == (PHONE[1], PHONE[0], 3) and picture[150:400].std() > 20
    replay.resize(*WIDE)


@pytest.fixture(scope="module")
def viewer(run: Path) -> Iterator[Viewer]:
    with serve(run, port=0, block=False, seed=3) as viewer:
        yield viewer


@pytest.fixture(scope="module")
def page(viewer: Viewer) -> Iterator[Browser]:
    with Browser(viewer.url, WIDE) as browser:
        browser.wait("document.body.innerText.includes('Policy: ')")
        until(lambda: len(viewer.server.get_clients()) == 1)
        yield browser


@only_all
def test_a_page_opened_before_the_world_is_there_says_what_is_loading() -> None:
    page_server = PageServer(port=0)
    with Browser(page_server.url, WIDE) as early:
        page_server.show_loading("the world of the test")
        early.wait("document.body.innerText.includes('Loading · the world of the test')")
        until(lambda: len(page_server.server.get_clients()) == 1)
        with Viewer(alone(LIFT), page_server=page_server):
            early.wait("document.body.innerText.includes('Policy: ')")
            assert "Loading" not in early.words()
            until(lambda: drawn(early))  # it looks from where those to come will


@only_all
def test_on_a_phone_the_camera_is_as_far_away_as_it_has_to_be(viewer: Viewer) -> None:
    before = set(viewer.server.get_clients())
    with Browser(viewer.url, PHONE) as phone:
        phone.resize(*PHONE, mobile=True)
        until(lambda: len(set(viewer.server.get_clients()) - before) == 1)
        client = viewer.server.get_clients()[max(viewer.server.get_clients())]
        eye = viewer.page.main_view.cameras.eye
        assert eye is not None
        far = fitted(eye, PHONE[0] / PHONE[1], COVERED).place

        def there() -> bool:
            return bool(np.linalg.norm(client.camera.position - far) < 0.1)

        until(there)
        # What happens where the page takes the viewpoint that all clients get after its own.
        client.camera.position, client.camera.look_at = eye.place, eye.target
        until(lambda: not there())
        until(there)


def test_the_page_opens_with_the_scene_and_its_controls(page: Browser, viewer: Viewer) -> None:
    words = page.words()
    for label in ("Play", "Step", "Speed", "Policy", "checkpoint", "Environment"):
        assert label in words
    _, _, wide, high = box(page, "canvas")
    assert wide > 300 and high > 300
    until(lambda: drawn(page))
    page.resize(*PHONE, mobile=True)
    page.wait("document.querySelector('canvas').getBoundingClientRect().width <= 390")
    assert page.run("document.documentElement.scrollWidth") <= PHONE[0]
    page.resize(*WIDE)


def test_keys_of_the_page_reach_the_session(page: Browser, viewer: Viewer) -> None:
    viewer.reset(3)
    viewer.step(6)
    for key, step in {"left": 5, "right": 6, "home": 0}.items():
        page.press(key)
        until(lambda step=step: viewer.session.at == step)
    page.press("space")
    until(lambda: viewer.playing and viewer.session.at > 0)
    page.press("space")
    until(lambda: not viewer.playing)
    page.press("n")
    until(lambda: viewer.session.episode.seed == 4)
    page.wait("document.body.innerText.includes('Step 0 of 0')")


def test_arrow_keys_step_and_leave_the_camera_where_it_is(page: Browser, viewer: Viewer) -> None:
    viewer.reset(3)
    (client,) = viewer.server.get_clients().values()

    def moved_by(key: str) -> NDArray[np.float64]:
        """From where it looks, once `key` has moved the camera."""
        before = client.camera.position.copy()

        def moved() -> bool:
            page.press(key, 0.5)
            return bool(np.linalg.norm(client.camera.position - before) > 1e-2)

        until(moved)
        offset = client.camera.position - client.camera.look_at
        return offset[:2] / np.linalg.norm(offset[:2])

    # Up and down move it in a vertical plane; what right would do is seen from there.
    first = moved_by("up")
    page.press("right", 2.0)
    until(lambda: viewer.session.at > 0)
    np.testing.assert_allclose(moved_by("down"), first, atol=1e-3)


def test_another_checkpoint_is_chosen_in_the_page(page: Browser, viewer: Viewer) -> None:
    viewer.choose("checkpoint 00000020")
    find = "[...document.querySelectorAll('input')].find(i => i.value.startsWith('checkpoint'))"
    page.wait(f"!!{find} && {find}.value === 'checkpoint 00000020'")
    corner = f"(() => {{ const b = {find}.getBoundingClientRect(); return [b.x, b.y]; }})()"
    left, top = page.run(corner)
    page.drag((left + 40, top + 8))
    options = "[...document.querySelectorAll('[role=option]')]"
    option = f"{options}.find(o => o.innerText.includes('checkpoint 00000010'))"
    page.wait(f"!!{option}")
    page.run(f"{option}.click()")
    until(lambda: viewer.session.chosen == "checkpoint 00000010")
    page.wait("document.body.innerText.includes('Policy: checkpoint 00000010')")


def test_two_policies_are_beside_each_other_at_both_widths(run: Path) -> None:
    with serve(run, port=0, block=False, seed=3, against="demonstrator") as viewer:
        half = viewer.page.half
        assert half is not None
        viewer.step(3)
        viewer.refresh()
        with Browser(viewer.url, WIDE) as browser:
            browser.wait("!!document.getElementById('half')")
            until(lambda: len(half.server.get_clients()) == 1)
            for width, height in (WIDE, PHONE):
                browser.resize(width, height, mobile=width < 576)
                until(lambda width=width: both_drawn(browser, width))
                assert browser.run("document.documentElement.scrollWidth") <= width
                left, _, wide, high = box(browser, "#half")
                assert left + wide == width and high == height
            # One camera turns with the other.
            (mine,) = viewer.server.get_clients().values()
            (other,) = half.server.get_clients().values()
            browser.resize(*WIDE)
            until(lambda: np.allclose(mine.camera.position, other.camera.position, atol=1e-2))
            before = mine.camera.position.copy()
            until(lambda: turned(browser, mine.camera.position, before))
            until(lambda: np.allclose(mine.camera.position, other.camera.position, atol=1e-2))


def both_drawn(browser: Browser, width: int) -> bool:
    """Whether a red cube and much else is seen in each half."""
    left, _, wide, _ = box(browser, "#half")
    picture = browser.picture()[70:].astype(int)  # below the captions
    halves = picture[:, int(left - wide) : int(left)], picture[:, int(left) : width]
    red = [((half[..., 0] - half[..., 1]) > 90).sum() > 20 for half in halves]
    return all(red) and min(half.std() for half in halves) > 15


def turned(browser: Browser, now: NDArray[np.float64], before: NDArray[np.float64]) -> bool:
    browser.press("up", 0.5)
    return bool(np.linalg.norm(now - before) > 1e-2)
