"""PPO's training speed (collection and ten epochs of updates) against SB3, in CPU time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.command import main
from benchmarks.measure import Block, Comparison, compare, cpu_time, table, write_json
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.learners.acceleration import accelerate, native_obstacle
from embodied.learners.learner import RunPlan
from embodied.learners.on_policy.ppo import Ppo
from embodied.training.collector import Collector
from embodied.training.on_policy import OnPolicyLoop
from embodied.training.trainer import Every, Trainer

ENV = "HalfCheetah-v5"
OBS, ACT, ROWS = 17, 6, 16
HORIZON, BATCH, EPOCHS = 128, 64, 10  # SB3's own numbers of gradient steps: 320 for 2,048 steps
POLICY = {"_target_": "embodied.policies.diagonal_gaussian.DiagonalGaussian", "hidden": [64, 64]}
LEARNER = {
    "_target_": "embodied.learners.on_policy.ppo.Ppo",
    "horizon": HORIZON,
    "batch_size": BATCH,
    "epochs": EPOCHS,
    "normalize": False,  # SB3's PPO does not normalise observations
}


def run(out: Path | str = "bench", repeats: int = 5) -> list[Comparison]:
    """Measure all settings on one thread, print the table, write `out/ppo.json`; about a minute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [training(repeats), updating(repeats), by_native_code(repeats)]
        if torch.cuda.is_available():
            rows += [flagged("cuda_graph", repeats), flagged("compile", repeats)]
    finally:
        torch.set_num_threads(threads)
    table(rows, "proximal policy optimisation, one thread")
    write_json(Path(out), "ppo", rows)
    return rows


def training(repeats: int) -> Comparison:
    """Our training loop on EnvPool against SB3's `learn` on its default vector environment."""
    name = f"PPO {ENV}, {ROWS} rows, {HORIZON * ROWS * EPOCHS // BATCH} minibatches of {BATCH}"
    return compare(our_loop(), their_loop(), repeats, name, target=3.5, clock=cpu_time)


def our_loop(env: str = "envpool") -> Block:
    """One batch of steps and its update, by our training loop."""
    if env == "envpool":
        from embodied.envs.envpool import Config, EnvPool

        worlds: Any = EnvPool(Config(ENV, num_envs=ROWS, threads=1))
    else:
        from embodied.envs.gym import Config as GymConfig
        from embodied.envs.gym import Gym

        worlds = Gym(GymConfig(ENV, num_envs=ROWS))
    torch.manual_seed(0)
    learner = learner_for(worlds.spec)
    accelerate(learner, native=True)
    loop = OnPolicyLoop(Collector(worlds, learner.policy, learner.gamma, seed=0), learner)

    def block() -> int:
        keeper = Trainer(NullLog(), HORIZON * ROWS, Every(0, 0, 0), print, print)  # pyright: ignore[reportArgumentType]
        loop.run(keeper)
        return keeper.step

    return block


def their_loop() -> Block:
    """The same by SB3."""
    model = their_model()

    def block() -> int:
        model.learn(HORIZON * ROWS, reset_num_timesteps=False)
        return HORIZON * ROWS

    return block


def their_model() -> Any:
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    sizes: dict[str, Any] = {"n_steps": HORIZON, "batch_size": BATCH, "n_epochs": EPOCHS}
    return PPO("MlpPolicy", make_vec_env(ENV, ROWS, seed=0), seed=0, device="cpu", **sizes)


def updating(repeats: int) -> Comparison:
    """The update alone on one batch, against SB3's `train`."""
    torch.manual_seed(0)
    learner, batch, model = learner_for(world()), batch_of(), their_model()
    accelerate(learner, native=True)
    model.learn(HORIZON * ROWS)
    count = HORIZON * ROWS * EPOCHS // BATCH

    def ours() -> int:
        learner.update(batch)
        return count

    def theirs() -> int:
        model.train()
        return count

    name = f"update alone, minibatches of {BATCH}"
    return compare(ours, theirs, repeats, name, "minibatches", clock=cpu_time)


def by_native_code(repeats: int) -> Comparison:
    """The update in native code against the same update in PyTorch."""
    torch.manual_seed(0)
    batch, fast, slow = batch_of(), learner_for(world()), learner_for(world())
    accelerate(fast, native=True)
    count = HORIZON * ROWS * EPOCHS // BATCH

    def updates(learner: Ppo) -> Block:
        return lambda: count if learner.update(batch) else 0

    name = f"update in native code against PyTorch ({native_obstacle(fast) or 'available'})"
    sides = updates(fast), updates(slow)
    return compare(*sides, repeats, name, "minibatches", clock=cpu_time)


def flagged(flag: str, repeats: int) -> Comparison:
    """Updates on the GPU with `flag` set against the same code without."""
    torch.manual_seed(0)
    batch = {key: value.to("cuda") for key, value in batch_of().items()}
    fast = accelerate(learner_for(world(), **{flag: True}).to("cuda"))
    plain = learner_for(world()).to("cuda")

    def updates(learner: Ppo) -> Block:
        def block() -> int:
            learner.update(batch)
            torch.cuda.synchronize()
            return HORIZON * ROWS * EPOCHS // BATCH

        return block

    name = f"{flag} against eager, GPU"
    return compare(updates(fast), updates(plain), repeats, name, "minibatches")


def learner_for(spec: Spec, **settings: object) -> Ppo:
    policy = build(POLICY, Policy, spec=spec)
    return build({**LEARNER, **settings}, Ppo, policy=policy, spec=spec, run=RunPlan())


def world() -> Spec:
    """An environment with HalfCheetah's dimensions, without a simulator."""
    return Spec({"state": Leaf((OBS,))}, Leaf((ACT,), low=-1.0, high=1.0), dt=0.05)


def batch_of() -> Tensors:
    """A batch of random transitions with HalfCheetah's dimensions."""
    times = (HORIZON, ROWS)
    no = torch.zeros(times, dtype=torch.bool)
    return {
        "obs/state": torch.randn(*times, OBS),
        "action": torch.randn(*times, ACT),
        "reward": torch.randn(times),
        "discount": torch.full(times, 0.99),
        "next_obs/state": torch.randn(*times, OBS),
        "ended": no,
        "first": no,
        "valid": ~no,
    }


class NullLog:
    """A log that stores nothing."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def advance(self, step: int) -> None: ...


if __name__ == "__main__":
    main(run)
