"""What a node may name, for the role that is asked for; types of settings and their bounds."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from embodied.core import build as module
from embodied.core.bounds import Bound, Count, CountOrZero, Fraction, Number, Positive
from embodied.core.build import ConfigError, allow, build, named_function, parse, resolve
from embodied.core.config_fields import in_words, require_settings, settings_of
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.core.reward import Reward
from embodied.core.saved_node import read_saved, require_inside
from embodied.nn.networks import QFunction
from embodied.policies.generative.chunk_sampler import Timed
from embodied.policies.networks.encoders import Encoder
from embodied.policies.wrappers.iwocs import Member
from tests.builders import ROOT, python
from tests.tiers import only_all

PACKAGES = ("embodied", "envs", "policies", "real_robot")
COLD = ("embodied/core/config_fields.py",)  # looks at classes and builds none
GAUSSIAN = "embodied.policies.gaussian"
TEMPORARY = "embodied.envs.fr3.warp_env"  # a file that catches a library's greeting


def calls(path: Path) -> Iterator[ast.Call]:
    """Calls of `build` and `resolve` in a file that imports them."""
    text = path.read_text()
    if "core.build import" in text or "core import build" in text:
        for node in ast.walk(ast.parse(text)):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if isinstance(node, ast.Call) and name in ("build", "resolve"):
                yield node


def sources(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def test_every_call_says_its_role() -> None:
    count = 0
    for path in sources(*PACKAGES, "benchmarks"):
        here = str(path.relative_to(ROOT))
        for call in calls(path):
            if isinstance(call.func, ast.Attribute):
                continue  # `path.resolve()`
            count += 1
            where = f"{here}:{call.lineno}"
            assert len(call.args) == 2, f"{where}: build(node, Role, ...)"
            role = ast.unparse(call.args[1])
            assert role not in ("Any", "nn.Module") and (role != "object" or here in COLD), where
    assert count > 150


def test_policies_are_made_of_policies_and_networks() -> None:
    """What policy.yaml may nest: no environment, driver, emulator, person or language model."""
    networks = {"Policy", "Timed", "QFunction", "Encoder", "Member", "cls", "type(self)"}
    known: dict[str, type] = {"Policy": Policy, "Timed": Timed, "QFunction": QFunction}
    known |= {"Encoder": Encoder, "Member": Member}
    for path in sources("policies"):
        for call in calls(path):
            assert ast.unparse(call.args[1]) in networks, f"{path}:{call.lineno}"
    for role in known.values():
        assert not issubclass(role, VecEnv)


@pytest.mark.parametrize(
    ("target", "role", "line"),
    [
        (f"{GAUSSIAN}.Gaussian", VecEnv, "is no VecEnv; if it should be one, write `class "),
        (f"{GAUSSIAN}.Policy", Policy, "write embodied.core.policy.Policy"),
        (f"{GAUSSIAN}.Gausian", Policy, 'no class Gausian (did you mean "Gaussian"?)'),
        (f"{GAUSSIAN}.torch", Policy, "no class torch"),
        (f"{GAUSSIAN}.__doc__", Policy, "no class __doc__"),
        (GAUSSIAN, Policy, "no class gaussian"),
        ("os.system", Policy, 'allow=["os"]'),
        ("policiesx.gaussian.Gaussian", Policy, "not in an allowed package"),
        (f"{GAUSSIAN}.Gaussian()", Policy, "no dotted name"),
        ("policies.\n.x", Policy, "no dotted name"),
    ],
)
def test_only_a_class_of_the_role_is_built(target: str, role: type, line: str) -> None:
    assert resolve(f"{GAUSSIAN}.Gaussian", Policy).__name__ == "Gaussian"
    with pytest.raises(ConfigError) as caught:
        resolve(target, role)
    assert line in str(caught.value) and "\n" not in str(caught.value)


class Plain:
    """It can do what a reward does, and does not say that it is one."""

    frozen = True

    def __call__(self, transitions: Any) -> Any:
        return transitions["reward"]


class Named(Plain, Reward):
    pass


@pytest.fixture
def own_packages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have allowed `tests`."""
    mine = [each for each in module.ALLOWED if each != "tests."]
    monkeypatch.setattr(module, "ALLOWED", mine)
    monkeypatch.setattr(module, "ASKED", [])


@pytest.mark.usefixtures("own_packages_only")
def test_a_users_class_needs_the_package_and_the_role() -> None:
    with pytest.raises(ConfigError, match=r'allow=\["tests"\]'):
        build({"_target_": f"{__name__}.Named"}, Reward)
    allow("tests")
    assert isinstance(build({"_target_": f"{__name__}.Named"}, Reward), Named)
    with pytest.raises(ConfigError, match=r"`class Plain\(Reward\)` \(from embodied.core.reward"):
        build({"_target_": f"{__name__}.Plain"}, Reward)


def test_functions_are_named_by_their_role() -> None:
    forward = named_function("embodied.embodiments.fr3.forward", "kinematics")
    assert forward.__name__ == "forward"
    for target, role in (
        ("embodied.embodiments.fr3.forward", "factor"),
        ("embodied.embodiments.fr3.namespace", "kinematics"),
        ("embodied.core.build.allow", "kinematics"),
        ("embodied.export.crazyflie.write_crazyflie", "onboard export"),
        ("os.system", "kinematics"),
    ):
        with pytest.raises(ConfigError, match=r"@registered|not in an allowed package"):
            named_function(target, role)


@pytest.mark.usefixtures("own_packages_only")
def test_what_a_saved_node_may_name() -> None:
    node = {"a": [{"_target_": "embodied.real_robot.drivers.sim.Sim"}]}
    advice = r'x names embodied.real_robot.*allow=\["embodied.real_robot"\]'
    with pytest.raises(ConfigError, match=advice):
        require_inside(node, "x")
    allow("my_lab")
    allow("my_lab.")  # it is allowed once
    assert module.asked_packages() == ("my_lab",)
    with pytest.raises(ConfigError, match="beyond this process"):
        require_inside(node, "x")
    allow("embodied.real_robot")
    require_inside(node, "x")


BILLION_LAUGHS = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- 1", "should hold settings"),
        ("", "should hold settings"),
        ("a: [", "is not YAML"),
        ("a: !!python/name:os.system", "is not YAML"),
        ("&a {b: *a}", "contains itself"),
        ("a: ${oc.env:HOME}", "refers to other settings"),
        ("a: " + "[" * 5000, "is not YAML"),
        (BILLION_LAUGHS, "more than 100,000 parts"),
    ],
)
def test_a_saved_file_that_is_no_settings(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_saved(file)
    assert line in str(caught.value) and "\n" not in str(caught.value)


WATCHING = """
import importlib, json, pkgutil, sys, sysconfig
library, seen, now = sysconfig.get_paths()["stdlib"], [], ""
events = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.remove",
          "os.rename", "os.mkdir", "shutil.rmtree", "socket.connect", "socket.bind")

def ours():
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((library, "<frozen")) or "site-packages" in file:
            return file.startswith(sys.argv[1]) and "site-packages" not in file
        frame = frame.f_back

def hook(event, args):
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if (event in events or writes) and ours():
        seen.append([now, event, str(args)[:200]])

sys.addaudithook(hook)
package = importlib.import_module("embodied")
for found in pkgutil.walk_packages(package.__path__, "embodied."):
    now = found.name
    try:
        importlib.import_module(now)
    except ImportError:
        pass  # a package that is not installed here
print(json.dumps(seen))
"""


@only_all
def test_importing_a_module_of_ours_does_nothing() -> None:
    """A node that is refused has had its module imported."""
    done = python("-W", "ignore", "-c", WATCHING, ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each for each in found if each[0] != TEMPORARY] == []


def test_a_module_that_lacks_its_package_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogbench", None)
    monkeypatch.delitem(sys.modules, "embodied.envs.ogbench.env", raising=False)
    with pytest.raises(ConfigError, match=r"type: pip install 'embodied-rl\[ogbench\]'"):
        resolve("embodied.envs.ogbench.env.Ogbench", VecEnv)


@dataclass(frozen=True)
class Inner:
    """Settings inside of settings."""

    rate: Positive = 1.0


@dataclass(frozen=True)
class Config:
    """One setting of each form."""

    gamma: Fraction = 0.99
    hidden: tuple[Count, ...] = (256, 256)
    subset: Count | None = None
    weights: dict[str, Number] = field(default_factory=dict[str, float])
    limit: Annotated[float, Bound(0.1, 50.0)] = 5.0
    span: tuple[CountOrZero, CountOrZero] = (0, 1)
    scale: Positive | Literal["auto"] = "auto"
    inner: Inner = field(default_factory=Inner)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gamma": 99}, "gamma=99 should be at least 0, at most 1"),
    ({"gamma": -0.1}, "gamma=-0.1 should be at least 0, at most 1"),
    ({"gamma": float("nan")}, "gamma=nan should be at least 0, at most 1"),
    ({"hidden": [64, 0]}, "hidden=0 should be at least 1"),
    ({"subset": 0}, "subset=0 should be at least 1"),
    ({"weights": {"a": float("inf")}}, "weights=inf should be a finite number"),
    ({"limit": 50.1}, "limit=50.1 should be at least 0.1, at most 50"),
    ({"span": [-1, 2]}, "span=-1 should be at least 0"),
    ({"scale": 0}, "scale=0 should be above 0"),
    ({"inner": {"rate": -1}}, "inner.rate=-1 should be above 0"),
]


@pytest.mark.parametrize(("settings", "line"), WRONG)
def test_a_number_out_of_its_bound_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(Config, settings, "here")
    assert str(refused.value) == f"here: {line}"
    key = line.partition("=")[0].rpartition(".")[2]
    assert refused.value.key == key and isinstance(refused.value.allowed, Bound)


def test_numbers_within_their_bounds_are_taken() -> None:
    given = {"gamma": 1, "hidden": [1], "subset": None, "limit": 50, "scale": "auto", "weights": {}}
    made = parse(Config, given, "here")
    assert made == Config(gamma=1.0, hidden=(1,), limit=50.0) and isinstance(made.gamma, float)


def test_errors_carry_data() -> None:
    errors: list[ConfigError] = []
    for call in (
        lambda: parse(Config, {"gama": 1}, "here"),
        lambda: parse(Config, {"hidden": 3}, "here"),
        lambda: parse(Config, {"scale": "atuo"}, "here"),
        lambda: resolve(f"{GAUSSIAN}.Gausian", Policy),
    ):
        with pytest.raises(ConfigError) as found:
            call()
        errors.append(found.value)
    assert [each.key for each in errors] == ["gama", "hidden", "scale", "_target_"]
    assert [each.hint for each in errors] == ["gamma", None, "auto", "Gaussian"]
    assert "hidden" in errors[0].allowed and errors[1].value == 3
    assert (errors[1].allowed, errors[2].allowed) == ("list", ("auto",))


MODULE = '''
"""A learner of a user."""
from dataclasses import dataclass
from typing import Literal
from embodied.core.bounds import Count, Fraction
import some.library as lib

Aim = Literal["min", "mean"]

@dataclass(frozen=True)
class Inner:
    """Inside."""
    size: Count = 1  # of it

@dataclass(frozen=True)
class Config:
    """Settings."""

    gamma: Fraction = 0.99  # discount per environment step
    hidden: tuple[Count, ...] = (256, 256)  # units of the hidden layers
    aim: Aim | None = None  # what is taken of the critics
    inner: Inner = Inner()  # more
    kind: lib.Kind | None = None  # of a library

class Own:
    def __init__(self, config: Config) -> None:
        raise RuntimeError("it is not imported")

raise RuntimeError("it is not imported")
'''


def test_bounds_are_read_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bounded_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("embodied.core.build.ALLOWED", ["bounded_module."])
    node = {"_target_": "bounded_module.Own", "gamma": 0.5, "hidden": [3], "aim": "min"}
    require_settings("learner", node | {"inner": {"size": 3}, "kind": "anything"})
    for settings, line in (
        ({"gamma": 99}, "learner.gamma=99 should be at least 0, at most 1"),
        ({"hidden": [0]}, "learner.hidden=0 should be at least 1"),
        ({"aim": "men"}, "learner.aim='men' is not allowed (did you mean \"mean\"?)"),
        ({"hidden": 3}, "learner.hidden=3 should be a list: [3], or [3,3]"),
    ):
        with pytest.raises(ConfigError) as refused:
            require_settings("learner", node | settings)
        assert str(refused.value) == line
    found = (settings_of("bounded_module.Own") or [])[:3]
    assert found[0].says == "discount per environment step"
    words = ["float, at least 0, at most 1", "list of int, at least 1", "min | mean; or null"]
    assert [in_words(each.kind) for each in found] == words
