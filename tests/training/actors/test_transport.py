"""Messages through a pipe and weights in shared memory: order, a writer beside a reader."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading

import pytest
import torch
from torch import nn

from embodied.core.env import Step
from embodied.training.actors.actor import Collected, decode, encode, joined, learned
from embodied.training.actors.pool import Inbox, SharedWeights


def test_a_writer_never_waits_and_its_end_is_that_of_the_inbox() -> None:
    """16 MB, which no pipe holds; half a message at the end, as of a killed writer, is none."""
    received, steps = mp.Pipe(duplex=False)
    inbox = Inbox(received)
    for number in range(2000):
        steps.send_bytes(number.to_bytes(8, "little") * (1 + number % 5000))
    os.write(steps.fileno(), (100).to_bytes(4, "big") + bytes(99))
    steps.close()
    inbox.thread.join(60)
    assert not inbox.thread.is_alive() and inbox.received == 2000
    for number, message in enumerate(inbox.queue):
        assert message == number.to_bytes(8, "little") * (1 + number % 5000)


def net(value: float) -> nn.Module:
    made = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    with torch.no_grad():
        for tensor in learned(made).values():
            tensor.fill_(int(value))
    made[2].requires_grad_(False)
    return made


def test_weights_are_copied_whole_and_only_when_they_are_new() -> None:
    ours, theirs = net(1), net(2)
    shared = SharedWeights(ours)
    assert shared.load_into(theirs, 0) == 0 and float(theirs.get_parameter("0.bias").data[0]) == 2
    assert shared.publish(ours) == 1 and shared.load_into(theirs, 0) == 1
    assert all(bool((each == 1).all()) for each in learned(theirs).values())
    assert float(theirs.get_parameter("2.bias")[0]) == 2, "frozen"
    assert "1.num_batches_tracked" in learned(theirs), "int64 buffers too"


def test_a_reader_never_sees_half_a_version() -> None:
    ours, theirs, stop = net(0), net(0), threading.Event()
    shared = SharedWeights(ours)

    def write() -> None:
        while not stop.is_set():
            with torch.no_grad():
                for tensor in learned(ours).values():
                    tensor.add_(1)
            shared.publish(ours)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    held = 0
    for _ in range(300):
        held = shared.load_into(theirs, held)
        values = torch.cat([each.double().flatten() for each in learned(theirs).values()])
        assert bool((values == values[0]).all()) and float(values[0]) == held
    stop.set()
    writer.join()


def collected(start: float, finished: bool, rows: bool = True) -> Collected:
    obs = {
        "state": torch.arange(6.0).view(2, 3) + start,
        "view/rgb": torch.zeros(2, 2, 2, 3).byte(),
    }
    following = {key: value.clone() for key, value in obs.items()} if finished else obs
    flags = torch.tensor([finished, False])
    log = {"success": flags.clone()}
    step = Step(obs, following, torch.tensor([start, 0.0]), flags, ~flags & False, log)
    made = {"obs/state": obs["state"][:1], "reward": step.reward[:1]} if rows else {}
    return Collected(made, step, torch.tensor([0]) if rows else None, int(start))


def same(one: Collected, other: Collected) -> bool:
    pairs = [(one.rows, other.rows), (one.step.obs, other.step.obs), (one.step.log, other.step.log)]
    pairs += [(one.step.next_obs, other.step.next_obs)]
    leaves = [(a[key], b[key]) for a, b in pairs for key in {*a, *b}]
    leaves += [(getattr(one.step, n), getattr(other.step, n)) for n in ("reward", "truncated")]
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in leaves)


@pytest.mark.parametrize("finished", [True, False])
def test_a_vector_step_is_sent_whole(finished: bool) -> None:
    sent = collected(3, finished)
    got = decode(encode(sent))
    assert same(sent, got) and got.version == 3
    assert got.finished is not None and got.finished.tolist() == [0]
    assert (got.step.next_obs is got.step.obs) == (not finished)


def test_the_envs_of_several_actors_are_numbered_one_after_the_other() -> None:
    made = joined(
        [collected(1, True), collected(2, False, rows=False), collected(5, False)],
        [0, 2, 4],
        [2] * 3,
    )
    assert made.finished is not None and made.finished.tolist() == [0, 4] and made.version == 1
    assert made.step.reward.tolist() == [1, 0, 2, 0, 5, 0]
    assert made.rows["reward"].tolist() == [1, 5]
