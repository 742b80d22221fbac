"""DERL: expressions of the grammar, their tree, the group-relative gradient, and what it finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.core.build import ConfigError, build
from embodied.core.env import VecEnv
from embodied.core.spec import Leaf, Spec
from embodied.nn.optim import Adam
from embodied.reward_design.designer import Board, Candidate, Experience, Journal, Verdict
from embodied.reward_design.designers import derl
from embodied.reward_design.designers.grammar import kinds, names_of
from embodied.rewards.handcrafted.expression import depth, evaluate, names_in, parse, written
from embodied.rewards.handcrafted.program import variables
from tests.reward_design.instant import WORLD

VALUES = {"a": torch.tensor([2.0, -1.0]), "b": torch.tensor([0.5, 0.0])}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a - b - 1", [0.5, -2.0]),  # from the left
        ("a + b * 4", [4.0, -1.0]),
        ("(a + b) * 4", [10.0, -4.0]),
        ("a / b", [4.0, -1e6]),  # SMALL in place of 0
        ("2 / 4 / a", [0.25, -0.5]),
        ("-a * -2", [4.0, -2.0]),
        ("1e1 * a - (3)", [17.0, -13.0]),
    ],
)
def test_an_expression_by_hand(text: str, expected: list[float]) -> None:
    said = parse(text, VALUES)
    torch.testing.assert_close(evaluate(said, VALUES), torch.tensor(expected))
    again = parse(written(said).replace("ratio", "").replace(",", "/"), VALUES)
    torch.testing.assert_close(evaluate(again, VALUES), torch.tensor(expected))


def test_numbers_are_folded() -> None:
    assert names_in(parse("1 / 0 + 2", "a")) == set() and depth(parse("1 / 0 + 2", "a")) == 0
    assert written(parse("a * (1 + 2)", "a")) == "(a * 3.0)"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "its end"),
        ("a +", "its end"),
        ("a b", '"b" where'),
        ("(a", "an open bracket"),
        ("a ** 2", r'"\*" where'),
        ("9**9**9", r'"\*" where'),
        ("__import__('os')", 'no "__import__"|"\'os'),
        ("a.real", '".real" where'),
        ("c", 'no "c"'),
        ("a[0]", r'"\[0\]" where'),
        ("(" * 5000 + "a", "deeper than 8"),
        ("-" * 5000 + "a", "deeper than 8"),
        ("a" + "+a" * 9, "deeper than 8"),
    ],
)
def test_what_is_no_expression_is_one_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(text, ["a", "b"])


def test_every_sample_is_an_expression_that_ends_in_time() -> None:
    torch.manual_seed(0)
    tokens = derl.Tokens(["a_0", "b_1"], length=7)
    generator = derl.Generator(tokens, 8)
    chance = torch.Generator().manual_seed(0)
    lengths = set[int]()
    for _ in range(100):
        drawn = generator.sample(chance)
        assert drawn.count(tokens.end) == 1 and len(drawn) <= 8
        parse(tokens.text(drawn, {}), ["a_0", "b_1"])
        lengths.add(len(drawn))
    assert lengths >= {2, 4, 8}


def test_advantages_by_hand() -> None:
    """Scores 2, 6 and an invalid one: R = 0, 1, -1, with mean 0 and std sqrt(2/3)."""
    found = derl.advantages([2.0, 6.0, None])
    torch.testing.assert_close(found, torch.tensor([0.0, 1.5**0.5, -(1.5**0.5)]))
    assert not derl.advantages([3.0, 3.0]).any() and not derl.advantages([None]).any()


def test_a_step_by_hand() -> None:
    """Equal chances of three tokens after one another: the gradient of the clipped objective at
    rho = 1 is -A (onehot - p) in the logits, a mean over the tokens; masked tokens have none."""
    tokens = derl.Tokens(["a_0"], length=1)
    generator = derl.Generator(tokens, 4)
    torch.nn.init.zeros_(generator.head.weight)
    torch.nn.init.zeros_(generator.head.bias)
    log, entropy, real = generator.evaluate([[0, tokens.end], [1, tokens.end]])
    six = torch.tensor(6.0).log()  # one primitive, five numbers; then only the end
    torch.testing.assert_close(log, torch.stack([-six, 0 * six]).expand(2, 2))
    torch.testing.assert_close(entropy, torch.stack([six, 0 * six]).expand(2, 2))
    assert real.all()
    (slope,) = torch.autograd.grad(
        (log[:, 0] * torch.tensor([-1.0, 1.0])).sum(), generator.head.bias
    )
    torch.testing.assert_close(slope[:3], torch.tensor([-1.0, 1.0, 0.0]))
    designer = derl.Derl(derl.Config(lr=0.05, passes=3, entropy=0.0))
    adam = Adam(generator.parameters(), 0.05, local=True)
    designer.learn(generator, adam, [[0, tokens.end], [1, tokens.end]], torch.tensor([1.0, -1.0]))
    chances = generator.evaluate([[0, tokens.end], [1, tokens.end]])[0][:, 0].exp()
    assert chances[0] > 1 / 6 > chances[1]


def test_equal_up_to_a_factor_and_a_constant() -> None:
    def same(text: str) -> str:
        return derl.sameness(parse(text, ["a", "b"]), ["a", "b"], [0, 1])

    assert same("a + b") == same("3 * b + 3 * a - 1") != ""
    assert len({same("a + b"), same("a - b"), same("a * b"), same("1 - a - b")}) == 4
    assert same("a - a") == same("3") == ""


SPEC = Spec(
    {"state": Leaf((6,), names=tuple(f"{w}_{a}" for w in ("tool", "goal") for a in "xyz"))},
    Leaf((2,), low=-1.0, high=1.0),
    dt=0.1,
)


def board(folder: Path, seed: int) -> Board:
    none = torch.zeros(0, dtype=torch.bool)
    nothing = Experience({}, None, none, none[None])
    found = variables(SPEC)
    return Board("", "", SPEC, found, Journal(folder), nothing, lambda _: Verdict(), seed)


def search(here: Board, lr: float, rounds: int, samples: int) -> list[float]:
    """The scores of all expressions. A training's place is taken by the correlation of the
    expression with the reward that would be right, over random values of the primitives."""
    designer = derl.Derl(derl.Config(lr=lr))
    terms = derl.atomic(kinds(here.variables), 12, here.seed)
    names = names_of(terms)
    chance = torch.Generator().manual_seed(1)
    values: dict[str, Tensor] = {n: torch.rand(256, generator=chance) for n in names}
    right = values[names[0]] + 0.5 * values[names[-1]]
    scores: list[float] = []
    for number in range(rounds):
        for proposal in designer.propose(here, number, samples):
            tokens = derl.Tokens(names, 13)
            said = parse(tokens.text(proposal.origin["expression"], {}), names)
            pair = torch.stack([evaluate(said, values), right])
            scores.append(float(torch.corrcoef(pair)[0, 1]))
            origin: dict[str, Any] = proposal.origin
            at = len(scores)
            done = Candidate(at, number, "", str(at), origin, scores=[(1, scores[-1])])
            here.ledger.put(done)
        here.ledger.close_round(number)
    return scores


def test_it_learns_which_expressions_train_well(tmp_path: Path) -> None:
    """Better on average in the last of eight rounds than random search, at equal evaluations; and
    the same again from the journal alone."""
    learned, random = (search(board(tmp_path / str(lr), 0), lr, 8, 8) for lr in (0.01, 0.0))
    assert sum(learned[-16:]) > sum(random[-16:]) + 16 * 0.1
    again = derl.Derl(derl.Config(lr=0.01))
    one, two = (again.propose(board(tmp_path / "0.01", 0), 8, 2) for _ in range(2))
    assert one == two


def test_programs_pass_the_gate_and_compute_the_expression() -> None:
    env = build(WORLD, VecEnv)
    found = variables(env.spec)
    terms = derl.atomic(kinds(found), 12, 0)
    tokens = derl.Tokens(names_of(terms), 13)
    words = [names_of(terms)[-1], "/", "(", names_of(terms)[0], "+", "3", ")", "end"]
    said, used = derl.Derl(derl.Config()).read(tokens, [tokens.words.index(w) for w in words])
    source = derl.written([terms[i] for i in used], derl.tree.written(said))
    assert "def ratio(a, b)" in source and "ratio(" in source.split("return")[-1]
    compile(source, "reward.py", "exec")
