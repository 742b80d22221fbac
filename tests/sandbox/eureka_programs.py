"""Reward programs in the style of Eureka: `compute_reward`, TorchScript, typed, (total, parts)."""

from __future__ import annotations

HEAD = "import torch\nfrom torch import Tensor\nfrom typing import Tuple, Dict\n"
SIGNED = "-> Tuple[torch.Tensor, Dict[str, torch.Tensor]]:"

START = f"\n{HEAD}\n@torch.jit.script\ndef compute_reward"

PROGRAMS = {
    "reach with a temperature": f"""(tool: torch.Tensor, goal: torch.Tensor) {SIGNED}
    distance = torch.norm(goal - tool, p=2, dim=-1)
    temp = torch.tensor(5.0)
    reach = torch.exp(-temp * distance)
    return reach, {{"reach": reach}}
""",
    "tuples of weights": f"""(tool: Tensor, cube: Tensor, action: Tensor) {SIGNED}
    w_near, w_act = 1.0, 0.05
    near = 1.0 / (1.0 + torch.norm(cube - tool, dim=-1) ** 2)
    effort = torch.sum(action ** 2, dim=-1)
    reward = w_near * near - w_act * effort
    return reward, {{"near": w_near * near, "effort": -w_act * effort}}
""",
    "shapes and devices": f"""(tool: torch.Tensor, goal: torch.Tensor) {SIGNED}
    device = tool.device
    reward = torch.zeros(tool.shape[0], device=device, dtype=tool.dtype)
    bonus = torch.ones_like(reward) * 10.0
    dist = torch.linalg.norm(tool - goal, dim=1)
    reward = reward - dist
    reward = torch.where(dist < 0.05, reward + bonus, reward)
    return reward, {{"dist": -dist}}
""",
    "staged pick and place": f"""(tool: Tensor, cube: Tensor, goal: Tensor, width: Tensor) {SIGNED}
    reach_temp, lift_temp, place_temp = 0.1, 0.05, 0.1
    reach = torch.exp(-torch.norm(cube - tool, dim=-1) / reach_temp)
    grasped = (torch.norm(cube - tool, dim=-1) < 0.03) & (width < 0.04)
    height = torch.clamp(cube[:, 2] - 0.02, min=0.0)
    lift = grasped.float() * torch.tanh(height / lift_temp)
    place = lift * torch.exp(-torch.norm(goal - cube, dim=-1) / place_temp)
    total = 0.5 * reach + 1.0 * lift + 2.0 * place
    return total, {{"reach": reach, "lift": lift, "place": place}}
""",
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
    "joint velocity penalty": f"""(q: Tensor, qd: Tensor, goal: Tensor, tool: Tensor) {SIGNED}
    velocity_penalty = -0.01 * torch.sum(torch.square(qd), dim=1)
    posture = -0.001 * torch.sum(torch.abs(q), dim=1)
    task = -torch.norm(goal - tool, dim=1)
    reward = task + velocity_penalty + posture
    return reward, {{"task": task, "vel": velocity_penalty, "posture": posture}}
""",
    "success bonus by where": f"""(cube: Tensor, goal: Tensor) {SIGNED}
    error = (cube - goal).pow(2).sum(-1).sqrt()
    success = torch.where(error < 0.1, torch.ones_like(error), torch.zeros_like(error))
    dense = torch.exp(-3.0 * error)
    return dense + 5.0 * success, {{"dense": dense, "success_bonus": 5.0 * success}}
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
    "values of min": f"""(tool: Tensor, cube: Tensor, goal: Tensor) {SIGNED}
    both = torch.stack([torch.norm(tool - cube, dim=-1), torch.norm(tool - goal, dim=-1)], dim=-1)
    closest = torch.min(both, dim=-1).values
    worst, _ = torch.max(both, dim=-1)
    return -closest - 0.1 * worst, {{"closest": -closest, "worst": -worst}}
""",
    "type of the constants": f"""(qd: Tensor, action: Tensor) {SIGNED}
    max_vel: float = 2.0
    smooth: Tensor = -torch.mean(torch.abs(action), dim=-1)
    excess: Tensor = torch.relu(torch.abs(qd) - max_vel).sum(dim=-1)
    total_reward = smooth - 0.5 * excess
    reward_components: Dict[str, Tensor] = {{"smooth": smooth, "excess": -excess}}
    return total_reward, reward_components
""",
    "components in a dict first": f"""(tool: Tensor, cube: Tensor, goal: Tensor) {SIGNED}
    parts: Dict[str, Tensor] = {{}}
    parts["reach"] = torch.exp(-4 * torch.norm(tool - cube, dim=-1))
    parts["push"] = torch.exp(-8 * torch.norm(goal - cube, dim=-1))
    total = torch.zeros_like(parts["reach"])
    for value in parts.values():
        total = total + value
    return total, parts
""",
    "a scalar among the components": f"""(tool: Tensor, goal: Tensor) {SIGNED}
    gap = torch.norm(goal - tool, dim=-1)
    return -gap, {{"gap": -gap, "mean_gap": gap.mean(), "temperature": torch.tensor(0.5)}}
""",
    "quaternion-like rotation": f"""(q: Tensor, goal: Tensor) {SIGNED}
    quat = q[:, :4] / torch.clamp(q[:, :4].norm(dim=-1, keepdim=True), min=1e-6)
    target = torch.tensor([1.0, 0.0, 0.0, 0.0], device=q.device)
    dot = torch.abs((quat * target).sum(dim=-1)).clamp(max=1.0)
    angle = 2.0 * torch.acos(dot)
    rot = 1.0 / (torch.abs(angle) + 0.1)
    return rot, {{"rot": rot}}
""",
    "a clipped penalty": f"""(action: Tensor, cube: Tensor) {SIGNED}
    penalty = torch.clip(torch.sum(action * action, -1), 0.0, 1.0)
    upright = torch.sigmoid(10 * (cube[..., 2] - 0.1))
    return upright - 0.1 * penalty, {{"upright": upright, "penalty": -penalty}}
""",
    "default temperatures": """(tool: Tensor, goal: Tensor, a: float = 0.1, b: float = 1.0):
    d = torch.norm(tool - goal, dim=-1)
    near, far = torch.exp(-d / a), torch.exp(-d / b)
    return near + far, {"near": near, "far": far}
""",
    "boolean masks": f"""(cube: Tensor, goal: Tensor) {SIGNED}
    reward = -torch.norm(cube - goal, dim=-1)
    high = cube[:, 2] > 0.1
    reward[high] += 1.0
    reward[~high & (cube[:, 0] < 0)] -= 0.5
    return reward, {{"high": high.float()}}
""",
    "a list of terms": f"""(tool: Tensor, cube: Tensor, action: Tensor) {SIGNED}
    terms = [-torch.norm(tool - cube, dim=-1), -0.01 * action.square().sum(-1)]
    weights = [1.0, 0.3]
    total = sum(w * t for w, t in zip(weights, terms))
    return total, {{f"term_{{i}}": t for i, t in enumerate(terms)}}
""",
    "progress between steps": f"""(cube: Tensor, next_cube: Tensor, goal: Tensor) {SIGNED}
    before = torch.norm(cube - goal, dim=-1)
    after = torch.norm(next_cube - goal, dim=-1)
    progress = 100.0 * (before - after)
    return progress, {{"progress": progress}}
""",
    "an unused component and a comment": f"""(tool: Tensor, goal: Tensor) {SIGNED}
    # Die Distanz \u2014 kleiner ist besser (\u2264 5 cm \u2192 Bonus)
    distance = (goal - tool).norm(dim=-1)
    bonus = (distance <= 0.05).float()
    return bonus - distance, {{"Abstand \u2193": -distance}}
""",
    "logarithms and roots": f"""(tool: Tensor, goal: Tensor, qd: Tensor) {SIGNED}
    d2 = torch.sum((goal - tool) ** 2, dim=-1)
    lin_log = -(d2 + 0.1 * torch.log(d2 + 1e-4))
    still = -1e-3 * torch.sqrt(torch.sum(qd ** 2, dim=-1) + 1e-8)
    return lin_log + still, {{"lin_log": lin_log, "still": still}}
""",
}
EUREKA = {name: each if each[0] == "\n" else START + each for name, each in PROGRAMS.items()}
