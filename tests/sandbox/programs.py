"""Legitimate reward programs: in the style of Eureka (`compute_reward`, TorchScript, typed, with
parts), of Text2Reward (`self.*`, numpy, one state at a time, classes), and as people write them."""

from __future__ import annotations

HEAD = "import torch\nfrom torch import Tensor\nfrom typing import Tuple, Dict\n"
SIGNED = "-> Tuple[torch.Tensor, Dict[str, torch.Tensor]]:"

EUREKA_START = f"\n{HEAD}\n@torch.jit.script\ndef compute_reward"

EUREKA_PROGRAMS = {
    "a helper in TorchScript": f"""
{HEAD}
@torch.jit.script
def soft_distance(a: Tensor, b: Tensor, scale: float = 0.2) -> Tensor:
    return 1.0 - torch.tanh(torch.norm(a - b, dim=-1) / scale)

@torch.jit.script
def compute_reward(tool: Tensor, cube: Tensor, goal: Tensor) {SIGNED}
    near = soft_distance(tool, cube)
    placed = soft_distance(cube, goal, 0.1)
    return near + 2 * placed, {{"near": near, "placed": placed}}
""",
    "alignment by a dot product": f"""
{HEAD}
import torch.nn.functional as F

@torch.jit.script
def compute_reward(tool: Tensor, next_tool: Tensor, goal: Tensor) {SIGNED}
    direction = F.normalize(goal - tool, dim=-1)
    motion = next_tool - tool
    progress = (direction * motion).sum(dim=-1)
    align = F.cosine_similarity(motion, direction, dim=-1)
    return 10.0 * progress + 0.1 * align, {{"progress": progress, "align": align}}
""",
    "type of the constants": f"""(qd: Tensor, action: Tensor) {SIGNED}
    max_vel: float = 2.0
    smooth: Tensor = -torch.mean(torch.abs(action), dim=-1)
    excess: Tensor = torch.relu(torch.abs(qd) - max_vel).sum(dim=-1)
    total_reward = smooth - 0.5 * excess
    reward_components: Dict[str, Tensor] = {{"smooth": smooth, "excess": -excess}}
    return total_reward, reward_components
""",
    "a scalar among the components": f"""(tool: Tensor, goal: Tensor) {SIGNED}
    gap = torch.norm(goal - tool, dim=-1)
    return -gap, {{"gap": -gap, "mean_gap": gap.mean(), "temperature": torch.tensor(0.5)}}
""",
    "an unused component and a comment": f"""(tool: Tensor, goal: Tensor) {SIGNED}
    # Die Distanz \u2014 kleiner ist besser (\u2264 5 cm \u2192 Bonus)
    distance = (goal - tool).norm(dim=-1)
    bonus = (distance <= 0.05).float()
    return bonus - distance, {{"Abstand \u2193": -distance}}
""",
}

NUMPY_START = "\nimport numpy as np\n\ndef compute_dense_reward(self, action):\n"

NUMPY_PROGRAMS = {
    "stages with else": """\
    reach = np.linalg.norm(self.cube - self.tool)
    place = np.linalg.norm(self.goal - self.cube)
    if reach > 0.1:
        stage, reward = 1, -reach
    elif place > 0.1:
        stage, reward = 2, 1.0 - place
    else:
        stage, reward = 3, 3.0
    reward -= 0.01 * np.square(action).sum()
    return reward
""",
    "parts in a dict": """\
    parts = {}
    parts["reach"] = -np.linalg.norm(self.cube - self.tool)
    parts["regular"] = -0.01 * np.sum(np.abs(action))
    if self.width < 0.02:
        parts["closed"] = 0.2
    return sum(parts.values()), parts
""",
    "a class with weights": """
import torch

class RewardFunction:
    def __init__(self):
        self.w_reach = 1.0
        self.w_action = 0.01

    def compute_dense_reward(self, action):
        distance = torch.norm(self.tool - self.goal, dim=-1)
        return -self.w_reach * distance - self.w_action * action.pow(2).sum(dim=-1)
""",
    "a class with methods": """
import torch

class Reward:
    SCALE = 5.0

    def distance(self, a, b):
        return torch.linalg.norm(a - b, dim=-1)

    def reaching(self):
        return 1 - torch.tanh(self.SCALE * self.distance(self.tool, self.cube))

    def compute_reward(self):
        reach = self.reaching()
        place = torch.exp(-self.distance(self.cube, self.goal))
        return reach + place, {"reach": reach, "place": place}
""",
    "a static helper": """
import numpy as np

class Reward:
    @staticmethod
    def shaped(distance, scale=3.0):
        return 1.0 - np.tanh(scale * distance)

    def compute_dense_reward(self, action):
        return self.shaped(np.linalg.norm(self.goal - self.cube, axis=-1))
""",
    "helper functions with self": """
import numpy as np

def reach_term(self):
    return -np.linalg.norm(self.tool - self.cube)

def grasp_term(self):
    return 1.0 if self.width < 0.03 else 0.0

def compute_dense_reward(self, action):
    return reach_term(self) + grasp_term(self)
""",
    "math instead of numpy": """
import math

def compute_dense_reward(self, action):
    dx, dy = self.goal[0] - self.tool[0], self.goal[1] - self.tool[1]
    return -math.hypot(dx, dy) - 0.05 * math.fabs(self.goal[2] - self.tool[2])
""",
    "a dataclass of weights": """
from dataclasses import dataclass
import numpy as np

@dataclass
class Weights:
    reach: float = 1.0
    action: float = 0.02

def compute_dense_reward(self, action):
    w = Weights()
    cost = w.action * np.sum(action ** 2, axis=-1)
    return -w.reach * np.linalg.norm(self.tool - self.cube, axis=-1) - cost
""",
    "what the instance remembers of itself": """
import numpy as np

class Reward:
    def compute_dense_reward(self, action):
        self.distance = np.linalg.norm(self.tool - self.goal, axis=-1)
        self.bonus = np.where(self.distance < 0.1, 1.0, 0.0)
        return self.bonus - self.distance
""",
    "a vector and a number": """\
    return -np.linalg.norm(self.tool - self.cube) - 0.5 * abs(self.width)
""",
}

PLAIN = {
    "one line": "def reward(goal, next_tool):\n    return -(goal - next_tool).norm(dim=-1)\n",
    "numpy with parts": """
def reward(cube, goal, action):
    d = np.sqrt(np.square(cube - goal).sum(axis=1))
    cost = 0.01 * np.square(action).mean(axis=1)
    return np.exp(-d) - cost, {"near": np.exp(-d), "cost": -cost}
""",
    "keyword-only and annotations": """
def reward(tool: "Tensor", *, goal: "Tensor", scale: float = 2.0) -> "Tensor":
    return torch.exp(-scale * torch.norm(tool - goal, dim=-1))
""",
    "constants at the top": """
import math
TARGET = torch.tensor([0.4, 0.0, 0.2])
SCALE = math.sqrt(2.0) / 4

def reward(next_cube):
    return torch.exp(-(next_cube - TARGET).norm(dim=-1) / SCALE)
""",
    "one transition at a time in torch": """
def reward(tool, goal, width):
    d = torch.norm(tool - goal)
    if d < 0.5 and width > 0:
        return 1.0 + width
    return -d
""",
    "partial and reduce": """
from functools import partial, reduce

def pull(a, b, scale):
    return torch.exp(-(a - b).norm(dim=-1) / scale)

def reward(tool, cube, goal):
    terms = [partial(f, scale=0.3) for f in (pull, pull)]
    return reduce(lambda x, y: x + y, [terms[0](tool, cube), terms[1](cube, goal)])
""",
    "printing while it works": """
def reward(tool, goal):
    d = (tool - goal).norm(dim=-1)
    print("closest", d.min().item())
    return -d
""",
}

LIKE_PUBLISHED = {
    "parts of a class tree": """
def compute_dense_reward(self, action):
    reach = np.linalg.norm(self.robot.tool - self.cube)
    moved = np.linalg.norm(self.after.robot.tool - self.before.robot.tool)
    grasped = float(self.robot.gripper.width < 0.02)
    return grasped - reach - 0.1 * moved, {"stage": "reach", "reach": -reach, "none": None}
""",
    "a class tree in torch": """
import torch

class Reward:
    def compute_dense_reward(self, action):
        distance = torch.norm(self.robot.tool - self.state.cube, dim=-1)
        return -distance - 0.01 * self.robot.qd.norm(dim=-1)
""",
    "quaternions of Isaac Gym": """
from isaacgym.torch_utils import *
from isaacgymenvs.utils.torch_jit_utils import quat_diff_rad

@torch.jit.script
def compute_reward(tool: Tensor, q: Tensor):
    turned = quat_unit(q[:, :4])
    forward = quat_rotate_inverse(turned, tool)
    angle = quat_diff_rad(quat_mul(turned, quat_conjugate(turned)), turned)
    return forward[:, 0] - angle, {"angle": -angle}
""",
    "imports that it does not use": """
import logging
import random
import torch
from scipy.spatial.transform import Rotation as R
from scipy.spatial import distance

def reward(tool, goal):
    return -torch.norm(tool - goal, dim=-1)
""",
    "an import that it can do without": """
import numpy as np
try:
    from scipy.spatial.distance import euclidean
except ImportError:
    euclidean = lambda a, b: np.linalg.norm(a - b)

def compute_dense_reward(self, action):
    return -euclidean(self.tool, self.goal)
""",
    "named tuples, vmap and a main guard": """
from typing import NamedTuple

class Parts(NamedTuple):
    near: torch.Tensor
    cost: torch.Tensor

def parts_of(tool, goal, action) -> Parts:
    near = torch.vmap(lambda a, b: -torch.linalg.norm(a - b))(tool, goal)
    return Parts(near, 0.01 * action.square().sum(-1))

def reward(tool, goal, action) -> "Tuple[torch.Tensor, Dict[str, torch.Tensor]]":
    try:
        parts = parts_of(tool, goal, action)
    except RuntimeError as error:
        raise ValueError(f"shapes {tool.shape}: {error}")
    return parts.near - parts.cost, parts._asdict()

if __name__ == "__main__":
    print(reward)
""",
    "what a method sets and then reads": """
class Reward:
    def __init__(self):
        self.bonus = 0.0

    def compute_reward(self):
        self.bonus = (self.width < 0.0).float()
        return self.bonus - torch.norm(self.tool - self.goal, dim=-1)
""",
}

LEGITIMATE = {
    name: each if each[0] in "\nd" else start + each
    for start, programs in (
        (EUREKA_START, EUREKA_PROGRAMS),
        (NUMPY_START, NUMPY_PROGRAMS),
        ("", PLAIN),
        ("", LIKE_PUBLISHED),
    )
    for name, each in programs.items()
}
