"""With LeRobot: train its own Diffusion policy, in half a minute on a CPU.

    PYTHON -m tests.interop.train_lerobot_diffusion IN OUT [STEPS [SEED]]

The dataset IN has numbers only (`observation.state`). LeRobot's Diffusion policy wants a picture or
an environment state besides, so that it gets the same numbers once more as
`observation.environment_state`. OUT is what LeRobot's `save_pretrained` writes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.factory import make_pre_post_processors

BATCH, LR, HORIZON = 64, 1e-3, 8
ENV = "observation.environment_state"


def main(folder: Path, out: Path, steps: int = 1200, seed: int = 0) -> None:
    torch.manual_seed(seed)
    fps = LeRobotDataset("local/data", root=folder).fps
    later = [k / fps for k in range(-1, HORIZON - 1)]
    times = {"observation.state": later[:2], "action": later}
    data = LeRobotDataset("local/data", root=folder, delta_timestamps=times)
    state, action = (tuple(data.meta.features[key]["shape"]) for key in times)
    inputs = {"observation.state": PolicyFeature(FeatureType.STATE, state)}
    config = DiffusionConfig(
        input_features={**inputs, ENV: PolicyFeature(FeatureType.ENV, state)},
        output_features={"action": PolicyFeature(FeatureType.ACTION, action)},
        normalization_mapping={k: NormalizationMode.MIN_MAX for k in ("STATE", "ENV", "ACTION")},
        horizon=HORIZON,
        n_action_steps=4,
        down_dims=(32, 64),
        n_groups=8,
        diffusion_step_embed_dim=32,
        kernel_size=3,
        noise_scheduler_type="DDIM",
        num_inference_steps=8,
        device="cpu",
    )
    # Read once: LeRobot's reader takes milliseconds a step, more than a gradient step here.
    keys = ("observation.state", "action", "action_is_pad")
    rows: Any = [{key: row[key] for key in keys} for row in map(data.__getitem__, range(len(data)))]
    stats = {**data.meta.stats, ENV: data.meta.stats["observation.state"]}
    before, after = make_pre_post_processors(config, dataset_stats=stats)
    policy = DiffusionPolicy(config).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR)
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, drop_last=True)
    done = 0
    while done < steps:
        for batch in loader:
            batch[ENV] = batch["observation.state"]
            loss, _ = policy.forward(before(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done % 100 == 0:
                print(f"{done}/{steps}  loss {loss.item():.4f}", flush=True)
            if done == steps:
                break
    for part in (policy, before, after):
        part.save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
