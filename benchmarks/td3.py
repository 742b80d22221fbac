"""TD3's updates for small quadrotor networks against SB3, and onnxruntime inference."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.command import main
from benchmarks.measure import Block, Comparison, compare, cpu_time, table, write_json
from benchmarks.peers.sb3 import updating
from benchmarks.sac import calling
from embodied.buffers.replay import ReplayBuffer
from embodied.core.build import build
from embodied.core.policy import Policy
from embodied.core.spec import Leaf, Spec
from embodied.export.decision import Decision, facts, write_onnx
from embodied.learners.acceleration import accelerate
from embodied.learners.learner import Learner

OBS, ACT, BATCH, STORED = 146, 4, 256, 100_000
SPEC = Spec({"state": Leaf((OBS,))}, Leaf((ACT,), low=-1.0, high=1.0), dt=0.01)
SMALL = {"hidden": [64, 64], "activation": "tanh"}


def run(out: Path | str = "bench", repeats: int = 7) -> list[Comparison]:
    """Measure all settings on one thread, print the table, write `out/td3.json`; under a minute."""
    made = rows(repeats, 1)
    table(made, "small networks, one thread")
    write_json(Path(out), "td3", made)
    return made


def rows(repeats: int, threads: int) -> list[Comparison]:
    """Updates (sampling included) of two 64 x 64 critics with a policy update every second time,
    and flow policies at batch size 1."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    try:
        small = {"net_arch": [64, 64], "activation_fn": torch.nn.Tanh}
        theirs = updating("td3", OBS, ACT, STORED, BATCH, 200, **small)
        name = f"TD3 update, {OBS} numbers, 64x64 tanh, batch {BATCH}"
        ours = our_updates(native=True)
        return [
            compare(ours, theirs, repeats, f"{name}, against SB3", "updates", 1.5, cpu_time),
            by_native_code(64, repeats),
            deciding(repeats, threads),
        ]
    finally:
        torch.set_num_threads(before)


def by_native_code(width: int, repeats: int) -> Comparison:
    """The update in native code against the same update in PyTorch."""
    blocks = [our_updates(100, width, native) for native in (True, False)]
    name = f"TD3 update, {width}x{width} tanh, native code against PyTorch"
    return compare(blocks[0], blocks[1], repeats, name, "updates", clock=cpu_time)


def our_updates(count: int = 200, width: int = 64, native: bool = False) -> Block:
    small = SMALL | {"hidden": [width, width]}
    policy = build(
        {"_target_": "embodied.policies.deterministic.Deterministic", **small}, Policy, spec=SPEC
    )
    node = {"_target_": "embodied.learners.off_policy.td3.Td3", "batch_size": BATCH, **small}
    learner = build(node, Learner, policy=policy, spec=SPEC)
    accelerate(learner, native)
    replay = ReplayBuffer(STORED)
    replay.add(
        {
            "obs/state": torch.randn(STORED, OBS),
            "action": torch.rand(STORED, ACT) * 2 - 1,
            "reward": torch.randn(STORED),
            "discount": torch.full((STORED,), 0.99),
            "next_obs/state": torch.randn(STORED, OBS),
        }
    )
    return calling(lambda: learner.update(replay.sample(BATCH)), count)


def deciding(repeats: int, threads: int) -> Comparison:
    """A flow policy (chunk 8, four steps) at batch size 1: exported to ONNX against PyTorch."""
    import onnxruntime

    policy = build({"_target_": "embodied.policies.generative.flow.Flow"}, Policy, spec=SPEC)
    decision = Decision(policy)
    given = decision.example(1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        written = write_onnx(decision, facts(decision), Path(folder) / "policy.onnx")
        session = onnxruntime.InferenceSession(str(written.path), options)

    def exported() -> object:
        feed = {k: v.numpy() for k, v in zip(decision.inputs, given, strict=True)}
        return session.run(None, feed)

    @torch.no_grad()
    def plain() -> Tensor:
        return decision(*given)

    name = "flow decision, onnxruntime against PyTorch"
    return compare(calling(exported, 500), calling(plain, 500), repeats, name, "decisions", 1.5)


if __name__ == "__main__":
    main(run)
