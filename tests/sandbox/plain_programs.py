"""Reward programs as people and models write them to the prompt here: `reward(names)`."""

from __future__ import annotations

PLAIN = {
    "one line": "def reward(goal, next_tool):\n    return -(goal - next_tool).norm(dim=-1)\n",
    "a lambda": """
near = lambda d, s: torch.exp(-d / s)

def reward(tool, goal):
    return near((tool - goal).norm(dim=-1), 0.3)
""",
    "default argument in a helper": """
def near(a, b, scale=0.1):
    return 1 - torch.tanh((a - b).norm(dim=-1) / scale)

def reward(tool, cube, goal):
    reach, place = near(tool, cube), near(cube, goal, scale=0.2)
    return reach + 2 * place, {"reach": reach, "place": place}
""",
    "nested functions": """
def reward(tool, goal):
    def squash(x):
        return x / (1 + x)
    d = torch.norm(tool - goal, dim=-1)
    return 1 - squash(d)
""",
    "a local called reward": """
def reward(tool, goal, action):
    reward = -torch.norm(tool - goal, dim=-1)
    reward -= 0.01 * (action ** 2).sum(dim=-1)
    return reward
""",
    "comprehension over data's columns": """
def reward(q):
    limits = [2.9, 1.8, 2.9, 3.1, 2.9, 3.8, 2.9]
    over = torch.stack([torch.relu(q[:, i].abs() - m) for i, m in enumerate(limits)], dim=-1)
    return -over.sum(dim=-1) - 0.01 * q.abs().sum(-1)
""",
    "numpy on batches": """
import numpy as np

def reward(tool, goal, width):
    d = np.linalg.norm(tool - goal, axis=-1)
    return np.where(d < 0.1, 1.0, -d) + 0.1 * np.clip(width, 0, 1)
""",
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
    "if on a constant": """
USE_BONUS = True

def reward(tool, goal):
    d = (tool - goal).norm(dim=-1)
    r = -d
    if USE_BONUS:
        r = r + (d < 0.05).float()
    return r
""",
    "a loop over stages": """
def reward(tool, cube, goal):
    total = 0
    for weight, (a, b) in zip((0.5, 1.0), ((tool, cube), (cube, goal))):
        total = total + weight * torch.exp(-5 * (a - b).norm(dim=-1))
    return total
""",
    "einsum and matmul": """
def reward(tool, goal, q):
    dot = torch.einsum("ij,ij->i", tool, goal)
    mix = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0.5]])
    d = ((tool - goal) @ mix).norm(dim=-1)
    return 0.1 * dot - d
""",
    "soft maximum": """
def reward(tool, cube, goal):
    both = torch.stack([(tool - cube).norm(dim=-1), (cube - goal).norm(dim=-1)], dim=-1)
    return -torch.logsumexp(both, dim=-1)
""",
    "try around nothing": """
def reward(tool, goal):
    try:
        d = torch.norm(tool - goal, dim=-1)
    except Exception:
        d = tool[:, 0] * 0
    return -d
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
    "an assertion on shapes": """
def reward(tool, goal):
    assert tool.shape == goal.shape and tool.ndim == 2, "batched positions"
    assert tool.shape[-1] == 3
    return -(tool - goal).pow(2).sum(-1)
""",
    "in place on a copy": """
def reward(action, tool, goal):
    weighted = action.clone()
    weighted[:, 3:] *= 0.1
    weighted.mul_(weighted)
    return -weighted.sum(dim=-1) - (tool - goal).norm(dim=-1)
""",
    "while with an end": """
def reward(tool, goal):
    d, scale, total = (tool - goal).norm(dim=-1), 1.0, 0.0
    while scale > 0.05:
        total = total + torch.exp(-d / scale)
        scale /= 2
    return total
""",
    "match and walrus": """
def reward(tool, goal):
    kind = "exp"
    d = (tool - goal).norm(dim=-1)
    match kind:
        case "exp":
            return (r := torch.exp(-d)) * 2 - 0 * r
        case _:
            return -d
""",
}
