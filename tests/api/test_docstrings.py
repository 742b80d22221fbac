"""Every exported name has a docstring whose example runs, at debug size."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator

import pytest

import embodied as em
from tests.docs.run import Page
from tests.docs.shared import Shared
from tests.tiers import usually

RUNS = {"outputs/pendulum_sac-0": "pendulum", "outputs/bc": "lift_base"}
# What an example takes for granted.
BEFORE = {
    "predict": "import gymnasium\nenv = gymnasium.make('Pendulum-v1')\n"
    "agent = em.load('outputs/pendulum_sac-0')",
    "rollout": "agent = em.load('outputs/bc')",
    "make_policy": "env = em.make_env('fr3_lift')",
    "make_learner": "policy = em.make_policy('flow', em.make_env('fr3_lift'))",
    "save": "policy = em.make_policy('flow', em.make_env('fr3_lift'))",
}


def exported() -> Iterator[tuple[str, str]]:
    """All exported names and the public methods of classes, with their docstrings."""
    for name in em.__all__:
        one = getattr(em, name)
        yield name, inspect.getdoc(one) or ""
        if inspect.isclass(one):
            for method, member in inspect.getmembers(one, inspect.isfunction):
                if not method.startswith("_"):
                    yield f"{name}.{method}", inspect.getdoc(member) or ""


DOCS = dict(exported())


def examples(doc: str) -> str:
    """The indented code of a docstring."""
    blocks = re.findall(r"(?<=\n\n)(?: {4}.*\n?)+", doc)
    return "\n".join(map(textwrap.dedent, blocks))


RUN = [name for name, doc in DOCS.items() if examples(doc)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, shared: Shared) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("examples")
    for place, name in RUNS.items():
        shutil.copytree(shared[name], folder / place)
    made = Page(folder)
    yield made
    made.close()


@pytest.mark.parametrize("name", usually({*RUN} - {"improve", "diagnose"}, RUN))
def test_its_example_runs(name: str, page: Page) -> None:
    page.python(f"import embodied as em\n{BEFORE.get(name.split('.')[-1], '')}")
    page.python(examples(DOCS[name]))


def test_every_name_has_an_example() -> None:
    """A class by one of its methods."""
    shown = {name.split(".")[0] for name, doc in DOCS.items() if examples(doc)}
    assert shown == set(em.__all__)
    assert [name for name, doc in DOCS.items() if len(doc.split()) < 8] == []
