"""Crafter: our environment against the package; random policy, resets included, same cores."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Block, Comparison, compare

ACTIONS = 17
PICTURES = ("image",)
SYMBOLS = ("symbols", "inventory")


def rows(repeats: int = 5, threads: int = 2) -> list[Comparison]:
    """Resets per second, then steps per second with symbolic (target 5) and image observations (3),
    each in `threads` processes and in one; about three minutes on two cores."""
    return [
        resets(repeats),
        steps("symbols", SYMBOLS, 5.0, 8 * threads, threads, repeats),
        steps("symbols", SYMBOLS, 5.0, 1, 0, repeats),
        steps("pictures", PICTURES, 3.0, 8 * threads, threads, repeats),
        steps("pictures", PICTURES, 3.0, 1, 0, repeats),
    ]


def resets(repeats: int) -> Comparison:
    """Resets of one environment against `crafter.Env.reset`, rendering included."""
    import crafter

    from embodied.envs.crafter.env import Config, Crafter

    ours, package = Crafter(Config(num_envs=1, workers=0, observe=PICTURES)), crafter.Env(seed=0)
    ours.reset(0)
    begin = torch.ones(1, dtype=torch.bool)

    def many() -> int:
        for _ in range(50):
            ours.reset(mask=begin)
        return 50

    def one() -> int:
        package.reset()
        return 1

    return compare(many, one, repeats, "Crafter x1", "resets", 5.0)


def steps(
    name: str, observe: tuple[Any, ...], target: float, count: int, workers: int, repeats: int
) -> Comparison:
    """Steps of `count` parallel envs in `workers` processes (0: this one) against as many
    independent loops of the package; episodes are reset when they end."""
    from embodied.envs.crafter.env import Config, Crafter

    ours = Crafter(Config(num_envs=count, workers=workers, observe=observe))
    ours.reset(0)
    random = torch.Generator().manual_seed(0)

    def block() -> int:
        for action in torch.randint(ACTIONS, (8000 // count, count), generator=random):
            ours.step(action)
        return 8000 // count * count

    peer = Peer(max(workers, 1))
    label = f"Crafter {name} x{count}, {max(workers, 1)} process{'es' if workers > 1 else ''}"
    comparison = compare(block, peer.block(300), repeats, label, target=target)
    ours.close()
    peer.close()
    return comparison


class Peer:
    """The package's loop, in independent processes."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.lines: list[Connection] = []
        self.processes = []
        for seed in range(count):
            line, other = context.Pipe()
            process = context.Process(target=play, args=(other, seed), daemon=True)
            process.start()
            self.lines.append(line)
            self.processes.append(process)

    def block(self, steps: int) -> Block:
        """A block of `steps` steps in every process."""

        def run() -> int:
            for line in self.lines:
                line.send(steps)
            return sum(line.recv() for line in self.lines)

        return run

    def close(self) -> None:
        for line, process in zip(self.lines, self.processes, strict=True):
            line.send(0)
            process.join(5)


def play(line: Connection, seed: int) -> None:
    """Random steps of one package environment, as many as each line of input requests; 0 stops
    it."""
    import crafter

    env, random = crafter.Env(seed=seed), np.random.default_rng(seed)
    env.reset()
    while steps := line.recv():
        for _ in range(steps):
            *_, done, _ = env.step(int(random.integers(ACTIONS)))
            if done:
                env.reset()
        line.send(steps)
