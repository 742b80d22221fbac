"""Replay: an episode, or two side by side, as one HTML page that opens without a server."""

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
from numpy.typing import NDArray

from embodied.core.atomic_write import write_durably
from embodied.viewer.export.html_replay_charts import FRAMES, Lane, charts, thinned
from embodied.viewer.scene.shapes import Mesh
from embodied.viewer.scene.types import Array, Eye, Followed, Shape, around
from embodied.viewer.session.episode import Moment

FOV = 0.7
"""Field of view (rad) where the world does not say."""
PICTURES = 400
"""Pictures of an episode that are kept in the page, evenly."""
WEB = files("embodied.viewer.export") / "web"
SCRIPTS = ("replay_math.js", "replay_draw.js", "replay_page.js")


@dataclass(frozen=True)
class Replay:
    """What the page shows: `lanes` of the same world, `dt` seconds a step, and where to look from.

    `names` are those of the elements of an action.
    """

    title: str
    facts: str
    dt: float
    lanes: Sequence[Lane]
    eye: Eye | None = None
    followed: Followed | None = None
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
        """The page, complete in itself."""
        # A title or a name may hold what would end the script.
        data = json.dumps(self.data(), allow_nan=False).replace("<", "\\u003c")
        parts = {
            "__TITLE__": escape(self.title),
            "__STYLE__": (WEB / "replay.css").read_text(),
            "__SCRIPT__": "\n".join((WEB / name).read_text() for name in SCRIPTS),
            "__DATA__": data,
        }
        page = (WEB / "replay.html").read_text()
        for mark, text in parts.items():
            page = page.replace(mark, text, 1)
        return page

    def data(self) -> dict[str, Any]:
        """All that the page's script is given."""
        lanes = [self._lane(lane) for lane in self.lanes]
        return {
            "title": self.title,
            "facts": self.facts,
            "made": "embodied view",
            "dt": self.dt,
            "plays": self.plays,
            "lanes": lanes,
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
            "wins": [step - episode.moments[0].step for step in episode.wins],
            "judged": episode.success is not None,
            "end": episode.end,
        }
        if moments[0].sight.places is not None:
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
            made["pictures"] = [picture_url(moment) for moment in some if moment.sight.picture]
        return made

    def _shape(self, shape: Shape) -> dict[str, Any]:
        mesh = shape.mesh()
        assert mesh is not None
        size = np.ptp(mesh[0], axis=0) if len(mesh[0]) else np.zeros(3)
        wide = shape.lines is not None or bool(min(size[0], size[1]) > 2.5 and size[2] < 0.1)
        return {
            "body": shape.body,
            "mesh": self._mesh(mesh),
            "rgba": [round(float(value), 4) for value in shape.rgba],
            "place": rounded(shape.place),
            "turn": rounded(shape.turn),
            "floor": (1.0 if max(size[:2]) > 15 else 0.5) if wide else 0,
        }

    def _mesh(self, mesh: Mesh) -> int:
        """Its number among the meshes; a mesh that many shapes or lanes have is there once."""
        if id(mesh) not in self._numbers:
            packed = packed_mesh(mesh)
            if packed not in self._meshes:
                self._meshes.append(packed)
            self._numbers[id(mesh)] = self._meshes.index(packed)
        return self._numbers[id(mesh)]

    def _eye(self) -> dict[str, Any]:
        places = moving(self.lanes[0].episode.moments, self.followed)
        if places is None:
            return {"place": [2, -2, 1], "target": [0, 0, 0], "fov": FOV, "reach": 1}
        eye = around(places) if self.eye is None else self.eye
        middle = places.mean(0)
        reach = float(np.linalg.norm(places - middle, axis=1).max()) * 1.15 + 0.05
        # As near as all that moves can be seen whole, from the side that the world's camera is on.
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
    """Place and turn of every body, [T, N, 7]."""
    return np.stack([np.concatenate([m.sight.places, m.sight.turns], 1) for m in moments])  # pyright: ignore


def moving(moments: Sequence[Moment], followed: Followed | None) -> Array | None:
    """Places [K, 3] of all that moves, as seen from what is followed; of everything where nothing
    moves; None without a scene."""
    if moments[0].sight.places is None:
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
    """Vertices in 65,536 steps from the lowest to the highest, and faces."""
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
    """The moment's picture, as small as PNG or JPEG make it."""
    from PIL import Image

    assert moment.sight.picture is not None
    image = Image.fromarray(moment.sight.picture.picture())
    made: list[tuple[str, bytes]] = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 82})):
        sink = io.BytesIO()
        image.save(sink, kind, **options)
        made.append((kind, sink.getvalue()))
    kind, data = min(made, key=lambda each: len(each[1]))
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
