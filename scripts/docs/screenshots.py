"""Draws the pictures of the project's own pages, 1400 and 375 pixels wide.

After `make docs` and `embodied demo`, in the repository:
MUJOCO_GL=egl python -m scripts.docs.screenshots docs/images/pages [NAME ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import markdown
import numpy as np
import yaml
from PIL import Image

from embodied.viewer import serve
from embodied.viewer.robot.app import monitor
from tests.viewer.browser import Browser, until

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
SIZES = (1400, 900), (375, 760)
IMPROVED = Path("outputs/demo/improved")
STILL = 2e-3
"""Share of the pixels that may change from one second to the next in a page that is finished."""
CLOSE = "document.querySelectorAll('.mantine-Notification-closeButton').forEach(e => e.click())"
"""Closes the viewer's notice that this browser renders in software."""
LIMIT = 120.0  # s until a page is taken as it is
STYLE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>body { max-width: 900px; margin: 0 auto; padding: 24px; color: #1f2328;
  font: 16px/1.5 "Noto Sans", "DejaVu Sans", sans-serif; }
img { max-width: 100%; } pre { background: #f6f8fa; padding: 16px; overflow-x: auto; }
code { font-size: 85%; } table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border: 1px solid #d1d9e0; padding: 6px 13px; } a { color: #0969da; }
</style>"""


@contextmanager
def readme() -> Iterator[str]:
    """The README as a host of repositories renders it."""
    with tempfile.NamedTemporaryFile("w", suffix=".html", dir=ROOT) as file:
        text = (ROOT / "README.md").read_text()
        file.write(STYLE + markdown.markdown(text, extensions=["tables", "fenced_code"]))
        file.flush()
        yield Path(file.name).as_uri()


@contextmanager
def page(name: str) -> Iterator[str]:
    """A page of the built site."""
    yield (SITE / f"{name}.html").as_uri()


def policies() -> tuple[Path, Path]:
    """The demo's improved policy and its base."""
    asked = yaml.safe_load((IMPROVED / "improve.yaml").read_text())
    found = yaml.safe_load((IMPROVED / "result.yaml").read_text())
    return Path(found["policy"]), Path(asked["policy"])


@contextmanager
def report() -> Iterator[str]:
    """The report of the improvement."""
    yield (IMPROVED / "report.html").resolve().as_uri()


@contextmanager
def viewer(pair: bool) -> Iterator[str]:
    """The improved policy, beside its base where `pair`: in the first episode that only the
    improved one solves, when the base fails."""
    improved, base = policies()
    with serve(improved, port=0, block=False, against=str(base)) as both:
        for seed in range(100):
            both.reset(seed)
            while not both.session.over:
                both.step()
            mine, other = (each.episode for each in both.session.sessions)
            if mine.success and not other.success:
                break
        at = len(other.moments) - 1
        if pair:
            both.scrub(at)
            both.refresh()
            yield both.url
    if not pair:
        with serve(improved, port=0, block=False, seed=seed) as alone:
            alone.step(at)
            alone.refresh()
            yield alone.url


@contextmanager
def dataset() -> Iterator[str]:
    """A recorded episode of the demonstrations, half way."""
    with serve(Path("outputs/demo/demos"), port=0, block=False) as recorded:
        recorded.scrub(recorded.session.length // 2)
        recorded.refresh()
        yield recorded.url


@contextmanager
def robot() -> Iterator[str]:
    """The page of a simulated arm after its episodes."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "arm"
        place.mkdir(mode=0o700)
        words = ["deploy", "robot=sim", "demonstrator=lift", "episodes=3", "yes=true"]
        command = [sys.executable, "-m", "embodied.cli", *words, f"out={folder}/out"]
        with monitor(place, port=0, block=False) as watching:
            subprocess.run([*command, f"folder={place}"], check=True, stdout=subprocess.DEVNULL)
            until(lambda: "finished" in watching.words(), watching.words)
            watching.refresh()
            yield watching.url


PAGES: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "readme": readme,
    "home": lambda: page("index"),
    "gallery": lambda: page("options/env"),
    "method": lambda: page("options/finetune/dsrl"),
    "report": report,
    "viewer": lambda: viewer(pair=False),
    "pair": lambda: viewer(pair=True),
    "dataset": dataset,
    "robot": robot,
}


def settled(browser: Browser) -> np.ndarray:
    """The page [H, W, 3] once it stays as it is."""
    end, before = time.monotonic() + LIMIT, browser.picture()
    while True:
        time.sleep(1.0)
        after = browser.picture()
        same = after.shape == before.shape and np.mean(after != before) < STILL
        if same or time.monotonic() > end:
            return after
        before = after


def main(folder: Path, names: list[str]) -> None:
    """Write FOLDER/NAME_1400.webp and FOLDER/NAME_375.webp of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or list(PAGES):
        with ExitStack() as stack:
            url = stack.enter_context(PAGES[name]())
            browser = stack.enter_context(Browser(url, SIZES[0]))
            browser.wait("document.readyState === 'complete'")
            browser.run(f"setTimeout(() => {CLOSE}, 3000)")
            for width, height in SIZES:
                browser.resize(width, height, mobile=width < 400)
                time.sleep(4.0)
                file = folder / f"{name}_{width}.webp"
                Image.fromarray(settled(browser)).save(file, quality=60, method=6)
                print(f"{file}: {file.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
