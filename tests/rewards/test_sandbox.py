"""Hostile programs: each is stopped at its layer, and the next program still runs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from embodied.core.build import ConfigError
from embodied.sandbox import gate as sandbox_module
from embodied.sandbox.allow_list import Rejected, check
from embodied.sandbox.gate import SLICE, Limits, Sandbox
from embodied.sandbox.lock import CALLS
from tests.rewards.sandbox_corpus import ATTACKS, FINE, RAW, body, gives

LIMITS = Limits(wall=1.5, cpu=3)
CASES = [(layer, name) for layer, items in ATTACKS.items() for name in items]
LINUX = pytest.mark.skipif(
    not (Path("/proc/self/statm").exists() and CALLS), reason="no filter for system calls here"
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS) as made:
        yield made


@pytest.fixture(scope="module")
def raw() -> Iterator[Sandbox]:
    with Sandbox(LIMITS, raw=True) as made:
        yield made


def rows(count: int = 64) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, 3, generator=torch.Generator().manual_seed(0))}


def test_the_corpus_is_large() -> None:
    assert sum(map(len, ATTACKS.values())) >= 60 and len(RAW) >= 40


@pytest.mark.parametrize(("layer", "name"), CASES)
def test_attacks_end_at_their_layer(sandbox: Sandbox, layer: str, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(Rejected) as caught:
        sandbox.gate(ATTACKS[layer][name], rows())
    assert caught.value.layer == layer, caught.value
    assert len(str(caught.value)) < 2000 and "\n" not in str(caught.value)
    assert time.monotonic() - began < 20  # a hang, not a speed


@LINUX
@pytest.mark.parametrize("name", RAW)
def test_the_process_holds_without_the_language(raw: Sandbox, name: str) -> None:
    line, reason = RAW[name]
    worker = raw.worker()
    with pytest.raises(Rejected) as caught:
        worker.ask(body(line, "return x[:, 0]"), [rows()["x"]], 64)
    worker.close()
    assert caught.value.layer == "process"
    assert re.search(reason, caught.value.reason), caught.value
    assert not Path("/tmp/escaped").exists()


@LINUX
def test_plain_python_runs_in_the_locked_process(raw: Sandbox) -> None:
    """Otherwise the battery above would prove nothing."""
    worker = raw.worker()
    paid = worker.ask("import torch\n" + FINE, [rows()["x"]], 64)
    torch.testing.assert_close(paid.total, torch.exp(-rows()["x"].norm(dim=-1)))
    assert worker.close() in ("SIGKILL", "exit 0")


@LINUX
def test_a_locked_process_says_so(sandbox: Sandbox) -> None:
    assert sandbox.status.startswith("seccomp on") and "possible" not in sandbox.status


GOOD = {
    "helpers, loops, numpy's names": (
        "SCALE = 0.5\n"
        "def near(v, scale: float) -> torch.Tensor:\n"
        "    '''Near.'''\n"
        "    return 1 - np.tanh(np.linalg.norm(v, axis=-1) / scale)\n"
        "def reward(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:\n"
        "    total = near(x, SCALE)\n"
        "    for i in range(1, 3):\n"
        "        total += i * x[:, i]\n"
        "    parts = {'near': total}\n"
        "    parts['first'] = torch.stack([x[:, j] for j in range(2)], dim=-1).sum(dim=-1)\n"
        "    return total, parts\n",
        lambda x: 1 - torch.tanh(x.norm(dim=-1) / 0.5) + x[:, 1] + 2 * x[:, 2],
    ),
    "where, masks, clamp": (
        body(
            "high = (x[:, 2] > 0) & ~(x[:, 0] > 1.0)",
            "return torch.where(high, x[:, 2].clamp(max=1), -0.5) + max(x[:, 0], 0) ** 2",
        ),
        lambda x: (
            torch.where((x[:, 2] > 0) & (x[:, 0] <= 1), x[:, 2].clamp(max=1), -0.5)
            + x[:, 0].clamp(min=0) ** 2
        ),
    ),
    "numbers as tensors": (
        gives("(x * torch.tensor([1.0, 2, -1])).sum(dim=1) + math.pi"),
        lambda x: x[:, 0] + 2 * x[:, 1] - x[:, 2] + torch.pi,
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_correct_programs_pay_what_they_say(sandbox: Sandbox, name: str) -> None:
    source, expected = GOOD[name]
    gated = sandbox.gate(source, rows())
    many = rows(SLICE + 100)
    torch.testing.assert_close(gated(many).total, expected(many["x"]))
    assert gated.report.rows == 64 and gated.report.cost > 0


@LINUX
def test_strict_mode_answers_as_trusted_mode(sandbox: Sandbox) -> None:
    with Sandbox(LIMITS, "strict") as strict:
        gated = strict.gate(FINE, rows())
        assert gated.held is not None
        many = rows(5000)
        torch.testing.assert_close(gated(many).total, sandbox.gate(FINE, rows())(many).total)
        gated.close()
        with pytest.raises(Rejected, match="stopped before"):
            gated(many)


def test_strict_mode_refuses_a_machine_that_cannot_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"seccomp": "not available on here", "user": "own", "test": ["open"]}
    monkeypatch.setattr(sandbox_module, "Worker", lambda *_: Free(state))
    with pytest.raises(ConfigError, match=r"strict mode needs a locked process.*open"):
        Sandbox(LIMITS, "strict")
    with Sandbox(LIMITS) as loose:
        assert loose.status == "seccomp not available on here, user own; still possible there: open"


class Free:
    """What a worker of a machine without a filter says of itself."""

    def __init__(self, state: dict[str, object]) -> None:
        self.state = state

    def close(self) -> None:
        """It holds nothing."""


def test_nan_on_later_rows_is_one_clear_line(sandbox: Sandbox) -> None:
    """The gate saw none; training does."""
    gated = sandbox.gate(gives("torch.log(x[:, 0] + 100)"), rows())
    with pytest.raises(Rejected, match="the reward is nan in 1 of 2 rows"):
        gated({"x": torch.tensor([[0.0, 0, 0], [-101.0, 0, 0]])})


def test_the_program_that_runs_has_no_attributes_and_no_builtins() -> None:
    import ast

    for source, _ in GOOD.values():
        tree = check(source).tree
        assert not any(isinstance(node, ast.Attribute) for node in ast.walk(tree))
