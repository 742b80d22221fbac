"""Processors of `--policy.type=embodied`: normalisers are inside of the policy."""

from typing import Any

from lerobot.processor import make_default_pre_post_processors


def make_embodied_pre_post_processors(
    config: Any, dataset_stats: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """A batch dimension and the device; nothing is normalised (`normalization_mapping`)."""
    return make_default_pre_post_processors(config, None)
