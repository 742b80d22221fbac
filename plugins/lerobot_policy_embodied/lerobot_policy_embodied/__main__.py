"""`python -m lerobot_policy_embodied RUN out=DIR`: what LeRobot's commands need of a run.

Or `url=URL token=TOKEN out=DIR` of a served policy, whose Spec is then asked for.
"""

import json
import sys
from pathlib import Path
from typing import Any

from lerobot.configs import FeatureType, PolicyFeature

from .configuration_embodied import EmbodiedConfig
from .processor_embodied import make_embodied_pre_post_processors

HIDDEN = ("critic/", "privileged/")


def written(spec: dict[str, Any], chunk: int, out: Path, **where: Any) -> list[str]:
    """Write the folder; the names of the numbers that the policy observes, in order."""
    seen = {name: leaf for name, leaf in spec["obs"].items() if not name.startswith(HIDDEN)}
    images = {name: leaf["shape"][:2] for name, leaf in seen.items() if leaf["dtype"] == "uint8"}
    leaves = {name: leaf["shape"][0] for name, leaf in seen.items() if name not in images}
    inputs = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, *size))
        for name, size in images.items()
    }
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (sum(leaves.values()),))
    outputs = {"action": PolicyFeature(FeatureType.ACTION, tuple(spec["act"]["shape"]))}
    config = EmbodiedConfig(
        input_features=inputs, output_features=outputs, leaves=leaves, chunk_size=chunk,
        images={name: list(size) for name, size in images.items()}, device="cpu", **where,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=False)
    config._save_pretrained(out)
    for pipeline in make_embodied_pre_post_processors(config):
        pipeline.save_pretrained(out)
    return [name for leaf in leaves for name in seen[leaf]["names"]]


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    runs = [word for word in words if "=" not in word]
    if "out" not in given or len(runs) + ("url" in given) != 1:
        sys.exit(
            "usage: python -m lerobot_policy_embodied RUN out=DIR (or url=URL token=TOKEN out=DIR)"
        )
    out = Path(given["out"])
    if out.exists():
        sys.exit(f"{out} exists already; choose another out=")
    if runs:
        from embodied.core.checkpoint import find, load_policy
        from embodied.core.saved_node import executed_steps

        folder = find(Path(runs[0])).resolve()
        spec, chunk = json.loads((folder / "spec.json").read_text()), load_policy(folder).chunk
        steps = executed_steps(folder) or 0
        names = written(spec, chunk, out, checkpoint=str(folder), n_action_steps=steps)
    else:
        from embodied.serve.client import Client

        with Client(given["url"], given.get("token")) as client:
            offer = client.metadata["embodied"]
        where = {"url": given["url"], "token": given.get("token", "")}
        names = written(offer["spec"], offer["chunk"], out, **where)
    print(f"{out} is written: lerobot-rollout --policy.path={out}")
    print(f"--robot.actions=controller --robot.numbers='{json.dumps(names)}'")


if __name__ == "__main__":
    main(sys.argv[1:])
