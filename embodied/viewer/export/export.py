"""Exports one episode, or two side by side, to a file: an HTML replay or a video."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodied.core.atomic_write import write_durably
from embodied.datasets.lerobot.video import encode_film
from embodied.reports.page import data_url
from embodied.viewer.panels.plots import groups_of, titled
from embodied.viewer.run_folder import ViewerError
from embodied.viewer.scene.types import Mesh, Picture, Shape, TrackedBody, Viewpoint, view_of
from embodied.viewer.session.episode import (
    TERM,
    CompressedImage,
    Moment,
    moving,
    poses_of,
    thinned,
)
from embodied.viewer.session.session import Session

FRAMES = 1500
"""Most steps stored per episode, evenly spaced; the page interpolates between them."""
PICTURES = 400
"""Most images stored per episode, evenly spaced."""
CURVES = 6
FOV = 0.7
"""Field of view (rad) if the scene does not define one."""
WEB = files("embodied.viewer.export") / "web"
SCRIPTS = ("replay_math.js", "replay_draw.js", "replay_page.js")
KINDS = (".html", ".mp4", ".gif")
LONGEST = 1000
"""Most steps of an exported episode; some environments never end one."""
STRIP, GAP = 26, 12
"""Height of the caption below each frame, and width between two frames, pixels."""


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
    data = film(session, path.suffix) if filmed else replay(session).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, lambda sink: sink.write(data))
    return path


def require_kind(path: Path) -> None:
    if path.suffix not in KINDS:
        raise ViewerError(f"export={path} must end with one of {', '.join(KINDS)}")


def label(session: Session) -> str:
    """The policy of a session: run and checkpoint, or the policy's name."""
    who = session.episode.policy_name
    return who if session.name in ("", who) else f"{session.name} · {who}"


def replay(session: Session) -> str:
    """The stored part of the running episode as an HTML page, complete in itself."""
    # A title or name could contain a tag that ends the script.
    parts = {
        "__TITLE__": escape(session.title[:1].upper() + session.title[1:]),
        "__STYLE__": (WEB / "replay.css").read_text(),
        "__SCRIPT__": "\n".join((WEB / name).read_text() for name in SCRIPTS),
        "__DATA__": json.dumps(replay_data(session), allow_nan=False).replace("<", "\\u003c"),
    }
    page = (WEB / "replay.html").read_text()
    for mark, text in parts.items():
        page = page.replace(mark, text, 1)
    return page


def replay_data(session: Session) -> dict[str, Any]:
    scene = session.recorder.scene
    followed = None if scene is None else scene.tracked_body()
    meshes: list[dict[str, Any]] = []
    return {
        "title": session.title[:1].upper() + session.title[1:],
        "facts": " · ".join(
            filter(None, (f"{session.counts} {session.episode.seed}", session.trial))
        ),
        "made": "embodied view",
        "dt": session.spec.dt,
        "lanes": [_lane(each, meshes) for each in session.sessions],
        "meshes": meshes,
        "eye": _eye(
            session.episode.moments, None if scene is None else scene.viewpoint(), followed
        ),
        "followed": None if followed is None else {"body": followed.body, "along": followed.along},
        "charts": charts(session.sessions),
    }


def charts(sessions: Sequence[Session]) -> list[dict[str, Any]]:
    """Reward (components), other numbers of each step, and the actions of the first session. The
    numbers of one group share a chart if there is one session."""
    every = {name for each in sessions for name in each.episode.number_names}
    terms = sorted(name for name in every if name.startswith(TERM))
    others = sorted(every - {*terms})
    groups = {name: ([name], False) for name in ("reward", *others)}
    if len(sessions) == 1:
        groups = groups_of([*(terms or ["reward"]), *others])
    made: list[dict[str, Any]] = []
    for title, (members, stacked) in groups.items():
        if members == [title]:
            curves = [
                _numbers(each, label(each), title) | {"colour": i, "dashed": i > 0}
                for i, each in enumerate(sessions)
            ]
        else:
            curves = [_numbers(sessions[0], name.partition("/")[2], name) for name in members]
        made.append({"title": title, "curves": curves, "stacked": stacked})
    if actions := _actions(sessions[0]):
        made.append({"title": titled("action", sessions[0].spec.act), "curves": actions})
    return made


def _numbers(session: Session, named: str, name: str) -> dict[str, Any]:
    taken, _ = thinned(session.episode.actions_taken, FRAMES)
    found = (m.reward if name == "reward" else m.numbers.get(name, np.nan) for m in taken)
    return _curve(named, taken, found)


def _actions(session: Session) -> list[dict[str, Any]]:
    taken, _ = thinned(session.episode.actions_taken, FRAMES)
    if not taken:
        return []
    actions = np.array([moment.action for moment in taken], np.float64)
    names = session.spec.act.names
    known = [*names, *(f"action {i}" for i in range(len(names), actions.shape[1]))]
    return [_curve(known[i], taken, actions[:, i]) for i in range(min(actions.shape[1], CURVES))]


def _curve(name: str, moments: Sequence[Moment], values: Iterable[Any]) -> dict[str, Any]:
    """A curve for JSON, which has no NaN."""
    shown = [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
    return {"name": name, "steps": [moment.step for moment in moments], "values": shown}


def _lane(session: Session, meshes: list[dict[str, Any]]) -> dict[str, Any]:
    """One episode; meshes that are not in `meshes` yet are added."""
    episode, trail = session.episode, session.trail()
    moments, stride = thinned(episode.moments, FRAMES)
    returns = np.cumsum([moment.reward for moment in episode.moments])
    made: dict[str, Any] = {
        "name": label(session),
        "steps": len(episode.moments) - 1,
        "stride": stride,
        "frames": len(moments),
        "wins": [step - episode.moments[0].step for step in episode.success_steps],
        "judged": episode.success is not None,
        "returns": [float(f"{value:.5g}") for value in returns[::stride]],
        "end": episode.end,
    }
    if moments[0].frame.places is None:
        some, made["stride"] = thinned(episode.moments, PICTURES)
        made["pictures"] = [picture_url(moment) for moment in some if moment.frame.picture]
        return made
    poses = poses_of(moments)
    return made | {
        "bodies": poses.shape[1],
        "poses": packed(poses.astype(np.float32)),
        "shapes": [_shape(shape, meshes) for shape in episode.shapes],
        "paths": [
            {"at": step, "lines": [rounded(line) for line in lines]}
            for step, lines in session.plans()
        ],
        "trail": None if trail is None else rounded(trail),
    }


def _shape(shape: Shape, meshes: list[dict[str, Any]]) -> dict[str, Any]:
    mesh = shape.mesh()
    assert mesh is not None
    size = np.ptp(mesh[0], axis=0) if len(mesh[0]) else np.zeros(3)
    wide = shape.lines is not None or bool(min(size[0], size[1]) > 2.5 and size[2] < 0.1)
    packed = packed_mesh(mesh)  # one that shapes or lanes share is stored once
    if packed not in meshes:
        meshes.append(packed)
    return {
        "body": shape.body,
        "mesh": meshes.index(packed),
        "rgba": [round(float(value), 4) for value in shape.rgba],
        "place": rounded(shape.place),
        "turn": rounded(shape.turn),
        "floor": (1.0 if max(size[:2]) > 15 else 0.5) if wide else 0,
    }


def _eye(
    moments: Sequence[Moment], eye: Viewpoint | None, followed: TrackedBody | None
) -> dict[str, Any]:
    places = moving(moments, followed)
    if places is None:
        return {"place": [2, -2, 1], "target": [0, 0, 0], "fov": FOV, "reach": 1}
    eye = view_of(places) if eye is None else eye
    middle = places.mean(0)
    reach = float(np.linalg.norm(places - middle, axis=1).max()) * 1.15 + 0.05
    # As near as everything that moves stays in view.
    away = np.asarray(eye.place, np.float64) - middle
    near = 0.85 * reach / np.sin((eye.fov or FOV) / 2)
    place = middle + away / np.linalg.norm(away) * min(near, float(np.linalg.norm(away)))
    fov = float(eye.fov or FOV)
    return {"place": rounded(place), "target": rounded(middle), "fov": fov, "reach": reach}


def packed_mesh(mesh: Mesh) -> dict[str, Any]:
    """Vertices quantised to 16 bits within their bounding box, and faces."""
    vertices, faces = mesh
    low, size = vertices.min(0), np.maximum(np.ptp(vertices, axis=0), 1e-9)
    places = np.round((vertices - low) / size * 65535).astype("<u2")
    kind = "<u4" if len(vertices) > 65535 else "<u2"
    return {
        "low": rounded(low),
        "size": rounded(size),
        "places": packed(places),
        "faces": packed(faces.astype(kind)),
    }


def packed(array: NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def rounded(array: NDArray[Any]) -> list[Any]:
    return np.round(np.asarray(array, np.float64), 5).tolist()


def picture_url(moment: Moment) -> str:
    """The step's image as a data URL, PNG or JPEG, whichever is smaller."""
    from PIL import Image

    assert moment.frame.picture is not None
    image = Image.fromarray(moment.frame.picture.picture())
    made: list[tuple[str, bytes]] = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 82})):
        sink = io.BytesIO()
        image.save(sink, kind, **options)
        made.append((kind, sink.getvalue()))
    kind, data = min(made, key=lambda each: len(each[1]))
    return data_url(f"image/{kind}", data)


def film(session: Session, kind: str) -> bytes:
    """An MP4 of all frames, or a GIF of at most 25 per second."""
    dt = session.spec.dt
    rows = [strips(each, session.length) for each in session.sessions]
    frames = [side_by_side([row[t] for row in rows]) for t in range(session.length)]
    frames += [frames[-1]] * round(0.8 / dt)
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


def side_by_side(pictures: Sequence[Picture]) -> Picture:
    """Images of equal size, with a gap."""
    gap = np.full((len(pictures[0]), GAP, 3), 255, np.uint8)
    parts = [part for picture in pictures for part in (gap, picture)][1:]
    return np.ascontiguousarray(np.concatenate(parts, 1))


def strips(session: Session, count: int) -> list[Picture]:
    """The captioned image of each step; the last is repeated while the other session goes on."""
    made: list[Picture] = []
    won = False
    for moment in session.episode.moments:
        picture = moment.frame.film or moment.frame.picture
        if not isinstance(picture, CompressedImage):
            why = session.recorder.render_error or "it has no image"
            raise ViewerError(
                f"this environment cannot be recorded as a video ({why}); use export=replay.html"
            )
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
