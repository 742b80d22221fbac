"""SAC's training speed (one update per environment step) and replay sampling against SB3."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.command import main
from benchmarks.measure import Block, Comparison, alone, compare, table, write_json
from embodied.buffers.replay import ReplayBuffer
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.acceleration import accelerate
from embodied.learners.off_policy.sac import Sac
from embodied.training.collector import Collector

ENV = "HalfCheetah-v5"
OBS, ACT, BATCH, CAPACITY = 17, 6, 256, 1_000_000
WARM = 300  # transitions stored before the first update
POLICY = {"_target_": "embodied.policies.gaussian.Gaussian", "hidden": [256, 256]}
LEARNER = {
    "_target_": "embodied.learners.off_policy.sac.Sac",
    "hidden": [256, 256],
    "batch_size": BATCH,
}


def run(
    out: Path | str = "bench", repeats: int = 7, steps: int = 40, stored: int = 200_000
) -> list[Comparison]:
    """Measure all settings on one thread, print the table, write `out/sac.json`; under a minute.

    `steps` is the length of one block (environment steps with an update each), `stored` the number
    of transitions in either replay buffer while sampling is timed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [training(steps, repeats), sampling(stored, repeats)]
        if torch.cuda.is_available():
            rows += [graphs("compile", repeats), graphs("cuda_graph", repeats)]
            rows.append(resident(repeats))
    finally:
        torch.set_num_threads(threads)
    table(rows, "soft actor-critic, one thread")
    write_json(Path(out), "sac", rows)
    return rows


def training(steps: int, repeats: int) -> Comparison:
    """Our training loop (environment, actor, replay, update) against SB3's `learn`, on the CPU."""
    ours, theirs = our_loop(steps), their_loop(steps)
    return compare(ours, theirs, repeats, f"SAC {ENV}, one update a step", target=1.5)


def our_loop(steps: int) -> Block:
    """`steps` steps of our collector, one update each."""
    from embodied.envs.gym import Config, Gym

    env = Gym(Config(ENV))
    torch.manual_seed(0)
    learner = learner_for(env.spec)
    replay = ReplayBuffer(CAPACITY)
    rollout = Collector(env, learner.policy.warmup_policy(), learner.gamma, seed=0)
    for _ in range(WARM):
        replay.add(rollout.step()[0])
    rollout.act_with(learner.policy)

    def block() -> int:
        for _ in range(steps):
            replay.add(rollout.step()[0])
            learner.update(replay.sample(learner.batch_size))
        return steps

    return block


def their_loop(steps: int) -> Block:
    """`steps` steps of SB3's own `learn`, one update each."""
    from stable_baselines3 import SAC

    sizes = {"net_arch": [256, 256]}
    model = SAC(
        "MlpPolicy",
        ENV,
        policy_kwargs=sizes,
        batch_size=BATCH,
        buffer_size=CAPACITY,
        learning_starts=WARM,
        seed=0,
        device="cpu",
    )
    model.learn(WARM)

    def block() -> int:
        model.learn(steps, reset_num_timesteps=False)
        return steps

    return block


def sampling(stored: int, repeats: int) -> Comparison:
    """`sample(256)` with HalfCheetah's dimensions against SB3's buffer, both holding `stored`
    transitions."""
    from gymnasium.spaces import Box
    from stable_baselines3.common.buffers import ReplayBuffer as Sb3ReplayBuffer

    ours = filled(ReplayBuffer(stored))
    spaces = [Box(-1, 1, (size,), np.float32) for size in (OBS, ACT)]
    theirs = Sb3ReplayBuffer(stored, spaces[0], spaces[1], device="cpu")
    rows = ours.take(torch.arange(stored))
    theirs.observations[:, 0] = rows["obs/state"].numpy()
    theirs.next_observations[:, 0] = rows["next_obs/state"].numpy()
    theirs.actions[:, 0] = rows["action"].numpy()
    theirs.rewards[:, 0] = rows["reward"].numpy()
    theirs.dones[:] = 0
    theirs.full = True
    return compare(
        calling(lambda: ours.sample(BATCH), 5000),
        calling(lambda: theirs.sample(BATCH), 1500),
        repeats,
        f"replay.sample({BATCH}) of {stored:,} rows",
        "samples",
        4.0,
    )


def graphs(flag: str, repeats: int) -> Comparison:
    """Updates on the GPU with `flag` set against the same code without; notes the start-up."""
    spec = world()
    torch.manual_seed(0)
    fast = learner_for(spec, **{flag: True}).to("cuda")
    plain = learner_for(spec).to("cuda")
    replay = filled(ReplayBuffer(100_000, "cuda"))
    started = time.perf_counter()
    for _ in range(5):
        fast.update(replay.sample(BATCH))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    row = compare(updating(fast, replay), updating(plain, replay), repeats, flag, "updates")
    return replace(row, name=f"{flag} against eager, GPU", notes={"start_seconds": seconds})


def resident(repeats: int) -> Comparison:
    """`sample(4096)` on the GPU."""
    replay = filled(ReplayBuffer(CAPACITY, "cuda"))
    block = calling(lambda: replay.sample(4096), 2000)
    return alone(synchronised(block), repeats, "replay.sample(4096), GPU", "samples")


def updating(learner: Sac, replay: ReplayBuffer, count: int = 200) -> Block:
    return synchronised(calling(lambda: learner.update(replay.sample(BATCH)), count))


def synchronised(block: Block) -> Block:
    def waited() -> int:
        count = block()
        torch.cuda.synchronize()
        return count

    return waited


def calling(work: Callable[[], object], count: int) -> Block:
    """A block of `count` calls."""

    def block() -> int:
        for _ in range(count):
            work()
        return count

    return block


def learner_for(spec: Spec, **settings: object) -> Sac:
    policy = build(POLICY, Policy, spec=spec)
    learner = build({**LEARNER, **settings}, Sac, policy=policy, spec=spec)
    return accelerate(learner, native=True)


def world() -> Spec:
    """An environment with HalfCheetah's dimensions, without a simulator."""
    return Spec({"state": Leaf((OBS,))}, Leaf((ACT,), low=-1.0, high=1.0), dt=0.05)


def filled(replay: ReplayBuffer) -> ReplayBuffer:
    """`replay` full of random transitions with HalfCheetah's dimensions."""
    rows: Tensors = {
        "obs/state": torch.randn(replay.capacity, OBS),
        "action": torch.rand(replay.capacity, ACT) * 2 - 1,
        "reward": torch.randn(replay.capacity),
        "discount": torch.full((replay.capacity,), 0.99),
        "next_obs/state": torch.randn(replay.capacity, OBS),
    }
    replay.add(rows)
    return replay


if __name__ == "__main__":
    main(run)
