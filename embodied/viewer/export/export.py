"""Exports one episode to a file: an HTML replay or a video."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied.core.atomic_write import write_durably
from embodied.datasets.lerobot.video import encode_film
from embodied.viewer.export.html_replay import Lane, Replay
from embodied.viewer.run_folder import ViewerError
from embodied.viewer.scene.types import Picture
from embodied.viewer.session.episode import CompressedImage
from embodied.viewer.session.session import Session

KINDS = (".html", ".mp4", ".gif")
LONGEST = 1000
"""Most steps of an exported episode; some environments never end one."""
GAP = 8
STRIP = 26
"""Height of the caption below each frame, pixels."""


def export(session: Session, path: Path, seed: int = 0, steps: int = LONGEST) -> Path:
    """Play the episode of `seed` (at most `steps` steps) into `path`: an HTML replay (.html) or a
    video (.mp4, .gif). ViewerError if the file cannot be made."""
    require_kind(path)
    filmed = path.suffix != ".html"
    for each in session.sessions:
        each.recorder.filming = filmed
    session.reset(seed)
    while not session.over and session.length <= steps:
        session.advance()
    if not filmed:
        return replay_of(session).write(path)
    rows = [list(strips(each, session.length)) for each in session.sessions]
    frames = [joined([row[t] for row in rows]) for t in range(session.length)]
    frames += [frames[-1]] * round(0.8 / session.spec.dt)
    data = film(frames, session.spec.dt, path.suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, lambda sink: sink.write(data))
    return path


def require_kind(path: Path) -> None:
    """ViewerError if the file suffix is not supported."""
    if path.suffix not in KINDS:
        raise ViewerError(f"export={path} must end with one of {', '.join(KINDS)}")


def replay_of(session: Session, plays: bool = True) -> Replay:
    """The stored part of the running episode as an HTML replay."""
    scene = session.recorder.scene
    lanes = [
        Lane(label(each), each.episode, each.plans(), each.trail()) for each in session.sessions
    ]
    return Replay(
        title=session.title[:1].upper() + session.title[1:],
        facts=" · ".join(filter(None, (f"{session.counts} {session.episode.seed}", session.trial))),
        dt=session.spec.dt,
        lanes=lanes,
        eye=None if scene is None else scene.viewpoint(),
        followed=None if scene is None else scene.tracked_body(),
        names=session.spec.act.names,
        plays=plays,
    )


def label(session: Session) -> str:
    """The policy of a session: run and checkpoint, or the policy's name."""
    who = session.episode.policy_name
    if not session.name or session.name == who:
        return who
    return f"{session.name} · {who}"


def film(frames: list[Picture], dt: float, kind: str) -> bytes:
    """An MP4 of all frames, or a GIF of at most 25 per second."""
    if kind == ".mp4":
        high, wide = (side - side % 2 for side in frames[0].shape[:2])
        every = torch.from_numpy(np.stack(frames))[:, :high, :wide]
        return encode_film(every, 1 / dt, quality=20)
    from PIL import Image

    stride = max(1, round(0.04 / dt))
    images = [Image.fromarray(frame) for frame in frames[::stride]]
    images = [image.resize((image.width // 2, image.height // 2)) for image in images]
    few: list[Any] = [image.quantize(128, dither=Image.Dither.NONE) for image in images]
    sink = io.BytesIO()
    wait = round(1000 * dt * stride)
    few[0].save(sink, "gif", save_all=True, append_images=few[1:], duration=wait, loop=0)
    return sink.getvalue()


def strips(session: Session, count: int) -> list[Picture]:
    """The captioned image of each step; the last is repeated while the other session goes on."""
    moments = session.episode.moments
    pictures = [moment.frame.film or moment.frame.picture for moment in moments]
    if any(picture is None for picture in pictures):
        why = session.recorder.render_error or "it has no image"
        raise ViewerError(
            f"this environment cannot be recorded as a video ({why}); use export=replay.html"
        )
    made: list[Picture] = []
    won = False
    for moment, picture in zip(moments, pictures, strict=True):
        assert isinstance(picture, CompressedImage)
        won = won or bool(moment.success)
        words = f"{label(session)}   step {moment.step}" + ("   success" if won else "")
        made.append(captioned(picture.picture(), words, won))
    return made + made[-1:] * (count - len(made))


def captioned(picture: Picture, words: str, won: bool) -> Picture:
    """The image above a strip with the text `words`."""
    from PIL import Image, ImageDraw, ImageFont

    high, wide = picture.shape[:2]
    image = Image.new("RGB", (wide, high + STRIP), (0, 90, 70) if won else (38, 46, 56))
    image.paste(Image.fromarray(picture))
    font = ImageFont.load_default(14)
    ImageDraw.Draw(image).text((10, high + 5), words, fill=(255, 255, 255), font=font)
    return np.asarray(image)


def joined(pictures: list[Picture]) -> Picture:
    gap = np.full((len(pictures[0]), GAP, 3), 255, np.uint8)
    return np.concatenate([part for picture in pictures for part in (gap, picture)][1:], 1)
