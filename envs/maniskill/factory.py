"""Makes ManiSkill environments: Vulkan driver, assets and one-line error messages."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from embodied.core.bounds import Count, CountOrZero
from embodied.envs.spaces import one_line, require_known_id

SOFTWARE = Path("/usr/share/vulkan/icd.d/lvp_icd.json")
CHOSEN = ("VK_ICD_FILENAMES", "VK_DRIVER_FILES")


def choose_driver() -> None:
    """Without a GPU, select Mesa's software Vulkan driver, unless the user chose a driver."""
    chosen = any(name in os.environ for name in CHOSEN)
    if not chosen and SOFTWARE.exists() and not torch.cuda.is_available():
        os.environ["VK_ICD_FILENAMES"] = str(SOFTWARE)


choose_driver()  # Vulkan reads this when SAPIEN is first used.
try:
    import gymnasium
    import mani_skill.envs  # noqa: F401  (registers its tasks)
    import sapien
    from mani_skill.utils import download_asset
    from mani_skill.utils.registration import REGISTERED_ENVS
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "ManiSkill is not installed; type: pip install 'embodied-rl[maniskill]'", name="mani_skill"
    ) from error

BACKENDS = {"cpu": ("physx_cpu", "cpu"), "gpu": ("physx_cuda", "gpu")}


Obs = Literal["state", "state_dict", "rgb", "rgbd", "pointcloud"]


@dataclass(frozen=True)
class Config:
    """Settings of a ManiSkill task.

    `end_on_success` is off by default, as in the evaluation of ManiSkill's baselines: dense rewards
    are largest after success, so ending there would penalise it.
    """

    id: str  # of a registered ManiSkill task
    num_envs: Count = 1  # parallel environments
    obs: Obs = "state"  # what is observed
    control_mode: str | None = None  # what actions mean (null: the robot's default)
    reward: Literal["dense", "normalized_dense", "sparse"] = "normalized_dense"  # its kind
    backend: Literal["auto", "cpu", "gpu"] = "auto"  # simulator (auto: the GPU for many envs)
    workers: CountOrZero = 0  # processes of CPU environments (0: none)
    horizon: Count | None = None  # steps of an episode (null: the task's limit)
    end_on_success: bool = False  # ManiSkill's success and failure terminate the episode
    image_size: tuple[Count, Count] | None = None  # height, width in pixels (null: the task's)
    cameras: tuple[str, ...] = ()  # observation cameras to keep (empty: all)
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # for `gymnasium.make`
    text: str = ""  # task instruction as a sentence

    @property
    def steps(self) -> int:
        """Steps of an episode at most; ValueError where neither the task nor `horizon` says."""
        steps = self.horizon or horizon_of(self.id)
        if steps is None:
            raise ValueError(f"{self.id} has no registered time limit; set env.horizon (steps)")
        return steps

    @property
    def simulator(self) -> Literal["cpu", "gpu"]:
        """Where the task is simulated. ValueError if that is a GPU that is not there."""
        cuda = torch.cuda.is_available()
        if self.backend == "gpu" and not cuda:
            raise ValueError("backend=gpu needs an NVIDIA GPU that torch can use; use backend=cpu")
        on_gpu = self.backend == "gpu" or (self.backend == "auto" and cuda and self.num_envs > 1)
        return "gpu" if on_gpu else "cpu"


class NoDriver(RuntimeError):
    """No Vulkan driver that SAPIEN can render with."""


def require_driver(backend: str) -> None:
    """Raise NoDriver, in one line, where SAPIEN finds no Vulkan device.

    Every ManiSkill task needs one, seen or not: robots load materials. The driver that was chosen
    first stays chosen for the life of the process.
    """
    try:
        sapien.render.set_log_level("off")
        sapien.render.RenderSystem(sapien.Device("cuda" if backend == "gpu" else "cpu"))
    except RuntimeError as error:
        told = next((f"; {name}={os.environ[name]}" for name in CHOSEN if name in os.environ), "")
        raise NoDriver(
            f"ManiSkill finds no Vulkan driver ({one_line(error)[:300]}{told}); "
            "type: sh scripts/system-packages.sh (it installs mesa-vulkan-drivers 24.3 or newer), "
            "or install your GPU's Vulkan driver"
        ) from error
    finally:
        sapien.render.set_log_level("warn")


def horizon_of(name: str) -> int | None:
    """The registered time limit of a task in steps; ValueError when there is no such task."""
    if name not in REGISTERED_ENVS:
        near = difflib.get_close_matches(name, REGISTERED_ENVS, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ValueError(f"unknown ManiSkill task {name!r}{hint}")
    return REGISTERED_ENVS[name].max_episode_steps


def task_text(name: str) -> str:
    """The first sentence of a task's own description, or its id."""
    told = REGISTERED_ENVS[name].cls.__doc__ or ""
    found = re.search(r"\*\*Task Description:?\*\*:?\s*(.+?)(?:\.\s|\n\s*\n|$)", told, re.DOTALL)
    return " ".join(found[1].split()).rstrip(".") if found else name


def make(settings: Config, count: int) -> Any:
    """A ManiSkill environment with `count` envs, without its time limit; errors are one line."""
    physics, drawing = BACKENDS[settings.simulator]
    options: dict[str, Any] = {
        "num_envs": count,
        "obs_mode": settings.obs,
        "reward_mode": settings.reward,
        "control_mode": settings.control_mode,
        "sim_backend": physics,
        "render_backend": drawing,
        **settings.kwargs,
    }
    if settings.image_size is not None:
        height, width = settings.image_size
        options["sensor_configs"] = {"width": width, "height": height}
    with _no_downloads(settings.id):
        try:
            require_known_id(settings.id, settings.kwargs)
            return gymnasium.make(settings.id, disable_env_checker=True, **options).unwrapped
        except (KeyError, NotImplementedError, AssertionError, TypeError, RuntimeError) as error:
            known = {key: value for key, value in options.items() if value is not None}
            raise ValueError(
                f"ManiSkill cannot make {settings.id} with {known}: {one_line(error)[:300]}"
            ) from (error)


@contextmanager
def _no_downloads(name: str) -> Iterator[None]:
    """ManiSkill asks on the terminal whether to download what a task lacks: say so instead."""

    def refuse(question: str, *_: Any) -> bool:
        what = question.split(" Would you")[0]
        raise FileNotFoundError(
            f"{what}; assets are not downloaded during training; type once, with network access: "
            f"python -m mani_skill.utils.download_asset {name}"
        )

    asked = download_asset.prompt_yes_no
    download_asset.prompt_yes_no = refuse
    try:
        yield
    finally:
        download_asset.prompt_yes_no = asked
