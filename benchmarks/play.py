"""Episodes of a demonstrator, written as the evaluation of a run: what studies compare with.

python -m benchmarks.play env=NAME demonstrator=NAME episodes=500 seed=1 out=DIR
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import torch

from embodied.compose import compose
from embodied.core.build import build
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.evaluation.evaluate import evaluate


def main(words: list[str]) -> None:
    node = compose("collect", words).node
    torch.manual_seed(node["seed"])
    with closing(build(node["env"] | {"num_envs": node["num_envs"]}, VecEnv)) as env:
        policy = build(node["demonstrator"], Policy, spec=env.spec)
        found = evaluate(policy, env, node["episodes"], node["seed"])
    metrics = {f"eval/{name}": value for name, value in found.metrics().items()}
    folder = Path(node["out"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, **metrics}) + "\n")
    print(f"success {metrics['eval/success']:.1%} of {node['episodes']} episodes")


if __name__ == "__main__":
    main(sys.argv[1:])
