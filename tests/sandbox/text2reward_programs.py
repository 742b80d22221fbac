"""Reward programs in the style of Text2Reward: `self.*`, numpy, one state at a time, classes."""

from __future__ import annotations

START = "\nimport numpy as np\n\ndef compute_dense_reward(self, action):\n"

PROGRAMS = {
    "reach": """
import numpy as np

def compute_dense_reward(self, action) -> float:
    distance = np.linalg.norm(self.goal - self.tool)
    return -distance
""",
    "bonus in an if": """
import numpy as np

def compute_dense_reward(self, action: np.ndarray) -> float:
    reward = 0.0
    distance = np.linalg.norm(self.cube - self.tool)
    reward += 1 - np.tanh(5 * distance)
    if distance < 0.05:
        reward += 2.0
    return reward
""",
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
    "a property": """
import numpy as np

class Reward:
    @property
    def offset(self):
        return self.goal - self.tool

    def compute_dense_reward(self, action):
        return -np.linalg.norm(self.offset, axis=-1)
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
    "clipping with min and max": """\
    height = max(0.0, float(self.cube[2]) - 0.02)
    lift = min(height / 0.2, 1.0)
    return lift - np.linalg.norm(self.cube - self.tool)
""",
    "an early return": """\
    if np.linalg.norm(self.goal - self.cube) < 0.3:
        return 10.0
    if abs(self.cube[0]) > 2.0:
        return -1.0
    return -np.linalg.norm(self.tool - self.cube)
""",
    "a loop over joints": """\
    penalty = 0.0
    for joint in range(7):
        penalty += max(0.0, abs(self.q[joint]) - 1.5)
    return -penalty - 0.1 * np.linalg.norm(self.qd)
""",
    "conditions joined by and": """\
    near = np.linalg.norm(self.cube - self.tool) < 0.5
    closed = self.width < 0.5
    grasped = near and closed and not self.cube[2] < -1
    return (1.0 if grasped else 0.0) - 0.1 * np.linalg.norm(self.goal - self.cube)
""",
    "a chained comparison": """\
    inside = -0.5 < self.cube[0] < 0.5 and -0.5 < self.cube[1] < 0.5
    return float(inside) - np.linalg.norm(self.cube[:2] - self.goal[:2])
""",
    "exponentials and dot products": """\
    to_goal = (self.goal - self.cube) / (np.linalg.norm(self.goal - self.cube) + 1e-8)
    push = (self.cube - self.tool) / (np.linalg.norm(self.cube - self.tool) + 1e-8)
    alignment = np.dot(to_goal, push)
    return alignment + np.exp(-np.linalg.norm(self.cube - self.tool))
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
    "next to before": """\
    before = np.linalg.norm(self.goal - self.cube)
    after = np.linalg.norm(self.next_goal - self.next_cube)
    return 10.0 * (before - after)
""",
}
TEXT2REWARD = {name: each if each[0] == "\n" else START + each for name, each in PROGRAMS.items()}
