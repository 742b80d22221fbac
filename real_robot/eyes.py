"""Eyes: the pictures of a policy that sees, from the cameras that a deployment names for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np

from embodied.core.build import ConfigError, Node, build
from embodied.core.spec import Spec
from real_robot.cameras import Camera, Frame, Rendered, Source, fitted

FIRST = 30.0  # s until a camera has shown something
FROZEN = 10  # pictures in a row that are the same to the last bit


def camera(node: Node) -> Camera:
    """Of a source's node; what is rendered repeats itself where nothing moves."""
    source: Source = build(node)
    return Camera(source, 0 if isinstance(source, Rendered) else FROZEN)


class Eyes:
    """As a context: a camera for every picture of `spec`, opened by the first `look`. ConfigError
    where a picture has no camera, or is none that one takes (of other than 3 channels)."""

    def __init__(self, spec: Spec, cameras: Mapping[str, Node], age: float) -> None:
        self.age, self.open = age, ExitStack()
        self.sizes = sizes(spec)
        if missing := [name for name in self.sizes if name not in cameras]:
            raise ConfigError(
                f"the policy sees pictures ({missing[0]}): name a camera for it "
                f"(robot.cameras.{missing[0]}={{_target_: real_robot.cameras.Video, device: ...}})"
            )
        self.cameras = {name: camera(cameras[name]) for name in self.sizes}
        self.opened = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.open.close()

    def pose(self, q: Any, width: float, values: Mapping[str, float]) -> None:
        """Rendered scenes show the joints `q`, and what is known by name, from now on."""
        for scene in self.scenes:
            scene.show(np.array(q), width, values)

    @property
    def scenes(self) -> list[Any]:
        """What is drawn and not taken."""
        found = (getattr(each.source, "scene", None) for each in self.cameras.values())
        return [scene for scene in found if scene is not None]

    def look(self) -> dict[str, Frame]:
        """The middle of each one's newest picture, uint8 [height, width, 3], as large as the policy
        wants it. CameraError where that is older than `age` s."""
        if not self.opened:
            self.opened = True
            for each in self.cameras.values():
                self.open.enter_context(each)
            for each in self.cameras.values():
                each.next(0, FIRST)
        return {
            name: fitted(self.cameras[name].newest(self.age).frame, *size)
            for name, size in self.sizes.items()
        }


def sizes(spec: Spec) -> dict[str, tuple[int, int]]:
    """Height and width of every picture that a policy of `spec` sees; ConfigError."""
    found: dict[str, tuple[int, int]] = {}
    for name, leaf in spec.obs.items():
        if leaf.is_image and not name.startswith(("critic/", "privileged/")):
            height, width, channels = leaf.shape
            if channels != 3:
                raise ConfigError(f"no camera takes pictures of {channels} channels ({name})")
            found[name] = (height, width)
    return found
