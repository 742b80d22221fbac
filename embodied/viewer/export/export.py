"""Exports one episode, or two side by side, to a file: an HTML replay or a video."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from embodied.viewer.panels.plots import groups_of
from embodied.viewer.run_folder import ViewerError
from embodied.viewer.scene.types import Array, Mesh, Picture, Shape, TrackedBody, Viewpoint, view_of
from embodied.viewer.session.episode import TERM, CompressedImage, Episode, Moment
from embodied.viewer.session.session import Session

FRAMES = 1500
"""Most steps stored per episode, evenly spaced; the page interpolates between them."""
CURVES = 6


@dataclass(frozen=True)
class Lane:
    """An episode and its `name`; `plans` are paths [K, H, 3] (m) at some of its steps, the chosen
    one first, `trail` [T, 3] is the tool's path."""

    name: str
    episode: Episode
    plans: Sequence[tuple[int, Sequence[Array]]] = ()
    trail: Array | None = None


def charts(lanes: Sequence[Lane], names: Sequence[str]) -> list[dict[str, Any]]:
    """Reward (components), other numbers of each step, and the actions of the first lane."""
    made: list[dict[str, Any]] = []
    every = {name for lane in lanes for name in lane.episode.number_names}
    terms = sorted(name for name in every if name.startswith(TERM))
    if terms and len(lanes) == 1:
        curves = [curve(lanes[0], name.removeprefix(TERM), name) for name in terms]
        made.append({"title": "reward terms", "curves": curves, "stacked": True})
    else:
        made.append({"title": "reward", "curves": each_lane(lanes, "reward")})
    made += known_of(lanes, sorted(every - set(terms)))
    action = actions_of(lanes[0], names)
    if action:
        made.append({"title": "action", "curves": action})
    return made


def known_of(lanes: Sequence[Lane], names: Sequence[str]) -> list[dict[str, Any]]:
    """Charts of the other numbers; numbers of one group share a chart if there is one lane."""
    if len(lanes) > 1:
        return [{"title": name, "curves": each_lane(lanes, name)} for name in names]
    made: list[dict[str, Any]] = []
    for title, (members, stacked) in groups_of(names).items():
        if members == [title]:
            made.append({"title": title, "curves": each_lane(lanes, title)})
            continue
        curves = [curve(lanes[0], name.partition("/")[2], name) for name in members]
        made.append({"title": title, "curves": curves, "stacked": stacked})
    return made


def actions_of(lane: Lane, names: Sequence[str]) -> list[dict[str, Any]]:
    """A curve for each of the first elements of the action."""
    taken, _ = thinned(lane.episode.actions_taken, FRAMES)
    actions = np.array([moment.action for moment in taken], np.float64)
    if not len(actions):
        return []
    known = [*names, *(f"action {i}" for i in range(len(names), actions.shape[1]))]
    return [
        {"name": known[i], "steps": steps_of(taken), "values": numbers(actions[:, i])}
        for i in range(min(actions.shape[1], CURVES))
    ]


def each_lane(lanes: Sequence[Lane], name: str) -> list[dict[str, Any]]:
    return [
        curve(lane, lane.name, name) | {"colour": i, "dashed": i > 0}
        for i, lane in enumerate(lanes)
    ]


def curve(lane: Lane, label: str, name: str) -> dict[str, Any]:
    """One number per step: the reward, or one of the step's `numbers`."""
    taken, _ = thinned(lane.episode.actions_taken, FRAMES)
    found = (m.reward if name == "reward" else m.numbers.get(name, np.nan) for m in taken)
    return {"name": label, "steps": steps_of(taken), "values": numbers(found)}


def steps_of(moments: Sequence[Moment]) -> list[int]:
    return [moment.step for moment in moments]


def numbers(values: Any) -> list[float | None]:
    """Numbers for JSON, which has no NaN."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def thinned(moments: Sequence[Moment], most: int) -> tuple[Sequence[Moment], int]:
    """Every `stride`-th step, at most about `most` of them, and `stride`."""
    stride = max(1, -(-len(moments) // most))
    return moments[::stride], stride


FOV = 0.7
"""Field of view (rad) if the scene does not define one."""
PICTURES = 400
"""Most images stored per episode, evenly spaced."""
WEB = files("embodied.viewer.export") / "web"
SCRIPTS = ("replay_math.js", "replay_draw.js", "replay_page.js")


@dataclass(frozen=True)
class Replay:
    """The content of the page: `lanes` (episodes of one environment), `dt` seconds per step,
    viewpoint.

    `names` are those of the action's elements.
    """

    title: str
    facts: str
    dt: float
    lanes: Sequence[Lane]
    eye: Viewpoint | None = None
    followed: TrackedBody | None = None
    names: Sequence[str] = ()
    plays: bool = True
    _meshes: list[dict[str, Any]] = field(default_factory=list, init=False)
    _numbers: dict[int, int] = field(default_factory=dict, init=False)

    def write(self, path: Path) -> Path:
        """Write the page; returns `path`."""
        page = self.html().encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, lambda sink: sink.write(page))
        return path

    def html(self) -> str:
        """The page, self-contained."""
        # A title or name could contain a tag that ends the script.
        parts = {
            "__TITLE__": escape(self.title),
            "__STYLE__": (WEB / "replay.css").read_text(),
            "__SCRIPT__": "\n".join((WEB / name).read_text() for name in SCRIPTS),
            "__DATA__": json.dumps(self.data(), allow_nan=False).replace("<", "\\u003c"),
        }
        page = (WEB / "replay.html").read_text()
        for mark, text in parts.items():
            page = page.replace(mark, text, 1)
        return page

    def data(self) -> dict[str, Any]:
        """The data for the page's script."""
        return {
            "title": self.title,
            "facts": self.facts,
            "made": "embodied view",
            "dt": self.dt,
            "plays": self.plays,
            "lanes": [self._lane(lane) for lane in self.lanes],
            "meshes": self._meshes,
            "eye": self._eye(),
            "followed": None
            if self.followed is None
            else {"body": self.followed.body, "along": self.followed.along},
            "charts": charts(self.lanes, self.names),
        }

    def _lane(self, lane: Lane) -> dict[str, Any]:
        episode = lane.episode
        moments, stride = thinned(episode.moments, FRAMES)
        made: dict[str, Any] = {
            "name": lane.name,
            "steps": len(episode.moments) - 1,
            "stride": stride,
            "frames": len(moments),
            "wins": [step - episode.moments[0].step for step in episode.success_steps],
            "judged": episode.success is not None,
            "end": episode.end,
        }
        if moments[0].frame.places is not None:
            poses = poses_of(moments)
            made |= {
                "bodies": poses.shape[1],
                "poses": packed(poses.astype(np.float32)),
                "shapes": [self._shape(shape) for shape in episode.shapes],
                "paths": [
                    {"at": step, "lines": [rounded(line) for line in lines]}
                    for step, lines in lane.plans
                ],
                "trail": None if lane.trail is None else rounded(lane.trail),
            }
        else:
            some, made["stride"] = thinned(episode.moments, PICTURES)
            made["pictures"] = [picture_url(moment) for moment in some if moment.frame.picture]
        return made

    def _shape(self, shape: Shape) -> dict[str, Any]:
        mesh = shape.mesh()
        assert mesh is not None
        size = np.ptp(mesh[0], axis=0) if len(mesh[0]) else np.zeros(3)
        wide = shape.lines is not None or bool(min(size[0], size[1]) > 2.5 and size[2] < 0.1)
        if id(mesh) not in self._numbers:  # a mesh shared by shapes or lanes is stored once
            packed = packed_mesh(mesh)
            if packed not in self._meshes:
                self._meshes.append(packed)
            self._numbers[id(mesh)] = self._meshes.index(packed)
        return {
            "body": shape.body,
            "mesh": self._numbers[id(mesh)],
            "rgba": [round(float(value), 4) for value in shape.rgba],
            "place": rounded(shape.place),
            "turn": rounded(shape.turn),
            "floor": (1.0 if max(size[:2]) > 15 else 0.5) if wide else 0,
        }

    def _eye(self) -> dict[str, Any]:
        places = moving(self.lanes[0].episode.moments, self.followed)
        if places is None:
            return {"place": [2, -2, 1], "target": [0, 0, 0], "fov": FOV, "reach": 1}
        eye = view_of(places) if self.eye is None else self.eye
        middle = places.mean(0)
        reach = float(np.linalg.norm(places - middle, axis=1).max()) * 1.15 + 0.05
        # As near as everything that moves stays in view, from the side of the scene's camera.
        away = np.asarray(eye.place, np.float64) - middle
        near = 0.85 * reach / np.sin((eye.fov or FOV) / 2)
        place = middle + away / np.linalg.norm(away) * min(near, float(np.linalg.norm(away)))
        return {
            "place": rounded(place),
            "target": rounded(middle),
            "fov": float(eye.fov or FOV),
            "reach": reach,
        }


def poses_of(moments: Sequence[Moment]) -> NDArray[np.float64]:
    """Position and quaternion of every body, [T, N, 7]."""
    return np.stack([np.concatenate([m.frame.places, m.frame.turns], 1) for m in moments])  # pyright: ignore


def moving(moments: Sequence[Moment], followed: TrackedBody | None) -> Array | None:
    """Positions [K, 3] of everything that moves, relative to the tracked body; of all bodies if
    nothing moves; None without a scene."""
    if moments[0].frame.places is None:
        return None
    places = poses_of(thinned(moments, 100)[0])[..., :3]
    if followed is not None:
        places = places - (places[:, followed.body] - places[0, followed.body])[:, None] * (
            np.array(followed.along)
        )
        return places[0]
    moves = np.ptp(places, axis=0).max(1) > 1e-3
    return places[:, moves if moves.any() else slice(1, None)].reshape(-1, 3)


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
