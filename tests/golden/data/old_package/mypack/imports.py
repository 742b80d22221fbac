"""Every import that README and docs show to users besides."""

from embodied.data import dataset
from embodied.rewards.sandbox import Sandbox
from embodied.rewards.subgoals import Guide
from embodied.viewer import serve
from embodied.viewer.export import export
from embodied.viewer.launch import open_session
from envs.gym_view import GymView
from envs.sb3_view import VecView
from embodied.real_robot.cameras import Video
from real_robot.seen import Seen, Seer

__all__ = [
    "Guide",
    "GymView",
    "Sandbox",
    "Seen",
    "Seer",
    "VecView",
    "Video",
    "dataset",
    "export",
    "open_session",
    "serve",
]
