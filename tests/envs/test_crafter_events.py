"""Crafter's steps in words: by hand, and on the way to a pickaxe."""

from __future__ import annotations

import pytest
import torch

from embodied.core.build import ConfigError, build
from embodied.core.policy import Policy
from embodied.core.tensors import Tensors
from embodied.envs.crafter.env import Config, Crafter
from embodied.envs.crafter.rules import ITEMS, SYMBOL, happened


def seen(ahead: str = "grass", sleeping: bool = False, **items: int) -> Tensors:
    """A player that looks left at `ahead`."""
    symbols = torch.full((1, 7, 9), SYMBOL["grass"], dtype=torch.uint8)
    symbols[0, 3, 3] = SYMBOL[ahead]
    inventory = torch.tensor(
        [[float(items.get(name, 5 if i < 4 else 0)) for i, name in enumerate(ITEMS)]]
    )
    return {
        "symbols": symbols,
        "facing": torch.zeros(1, 1, dtype=torch.uint8),
        "body": torch.tensor([[float(sleeping), 1.0]]),
        "inventory": inventory,
    }


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (seen("tree"), seen("tree", wood=1), "you collected wood"),
        (seen(wood=1), seen("table"), "you placed a table"),
        (seen("table", wood=1), seen("table", wood_pickaxe=1), "you made a wood pickaxe"),
        (seen(sapling=1), seen("plant"), "you placed a plant"),
        (seen("cow"), seen(food=9), "you ate a cow"),
        (seen("water"), seen("water", drink=6), "you drank water"),
        (seen(), seen(sleeping=True), "you fell asleep"),
        (seen(), seen(health=3), "you were hurt badly"),
        (seen(), seen(drink=4), "you are thirstier"),
        (seen(), seen("iron"), "you face iron"),
        (seen("tree"), seen("tree"), ""),
    ],
)
def test_what_happened(before: Tensors, after: Tensors, said: str) -> None:
    assert happened(before, after) == [said]


def test_pictures_alone_do_not_say() -> None:
    with pytest.raises(ConfigError, match="symbols and inventory"):
        happened({"image": torch.zeros(1)}, {"image": torch.zeros(1)})


def test_on_the_way_to_a_pickaxe() -> None:
    """A scripted player's messages: wood before the table, the table before the pickaxe."""
    env = Crafter(Config(num_envs=4, workers=0, length=400, goal="make_wood_pickaxe"))
    player = build(
        {"_target_": "embodied.policies.scripted.grids.Woodcutter"}, Policy, spec=env.spec
    )
    obs, said = env.reset(0), [[] for _ in range(4)]
    carry, over = player.initial(4), torch.zeros(4, dtype=torch.bool)
    for _ in range(400):
        action, carry = player.act(obs, carry, player.sample_noise(4))
        step = env.step(action[:, 0])
        for row, text in enumerate(env.event_captions(obs, step.next_obs)):
            said[row] += [text] if text and not over[row] else []
        obs, over = step.obs, over | step.ended
        if over.all():
            break
    won = [texts for texts in said if "you made a wood pickaxe" in texts]
    assert len(won) >= 2
    for texts in won:
        assert texts[-1] == "you made a wood pickaxe"
        assert texts.index("you collected wood") < texts.index("you placed a table")
