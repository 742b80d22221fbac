"""How `data/names.txt`, `names_gone.txt` and `settings.txt` were made, at commit 8490570.

    python -m tests.golden.make_names

Kept as documentation, not run by tests: later names do not belong into these files. A name is there
if a YAML file may have it: it stood in one of this project at any time, or it is a policy, learner
or environment that `build` makes (and so in a run.yaml, a policy.yaml, a YAML of a user's).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import embodied
from embodied import envs, policies, real_robot
from embodied.core.build import ConfigError, named_function, resolve
from embodied.core.env import VecEnv
from embodied.core.policy import Policy
from embodied.learners.learner import Learner
from tests.golden.fingerprint import FOLDER
from tests.golden.test_learners import contract

COMMIT = "8490570"
DATA = FOLDER / "data"
ROOTS = (embodied, envs, policies, real_robot)
NAME = re.compile(r"\b(?:embodied|envs|policies|real_robot)(?:\.[A-Za-z_]\w*)+")
TARGET = re.compile(r"_target_[\"']?\s*[:=]\s*[\"']?(" + NAME.pattern + ")")


def history(*paths: str) -> str:
    """Every line that was ever added to files of these paths."""
    words = ["git", "log", "-p", COMMIT, "--unified=0", "--format=", "--", *paths]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith("+"))


def written() -> set[str]:
    """Names in YAML files, and `_target_`s in code and in the documentation."""
    yaml = {name for name in NAME.findall(history("*.yaml", "*.yml")) if "." in name}
    return yaml | set(TARGET.findall(history("*.py", "*.md", "*.json", "*.jsonl")))


def modules() -> Iterator[str]:
    for root in ROOTS:
        for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if ".peers" not in found.name and "__main__" not in found.name:
                yield found.name


def buildable() -> set[str]:
    """Policies, learners and environments that `build` makes: their `__init__` has a `config`."""
    names: set[str] = set()
    for module in modules():
        try:
            classes = inspect.getmembers(importlib.import_module(module), inspect.isclass)
        except ImportError as error:
            print(f"{module} is left out: {error}")
            continue
        names |= {f"{module}.{name}" for name, cls in classes if _built(cls, module, name)}
    return names


def _built(cls: type, module: str, name: str) -> bool:
    own = cls.__module__ == module and issubclass(cls, Policy | Learner | VecEnv)
    return own and not name.startswith("_") and "config" in inspect.signature(cls).parameters


def there(name: str) -> bool:
    """Whether it is a class, a function or a module of today."""
    for role in ("kinematics", "scheduled reward", "onboard export"):
        with suppress(ConfigError, ImportError):
            return named_function(name, role) is not None
    try:
        resolve(name, object)
    except (ConfigError, ImportError):
        try:
            importlib.import_module(name)
        except ImportError:
            return False
    return True


def options() -> list[str]:
    return sorted(f"{path.parent.name}/{path.stem}" for path in contract.CONFIGS.glob("*/*.yaml"))


def save(name: str, lines: list[str]) -> None:
    (DATA / name).write_text("".join(f"{line}\n" for line in lines))
    print(f"{name}: {len(lines)}")


def main() -> None:
    names = sorted(written() | buildable())
    known = {name: there(name) for name in names}
    save("names.txt", [name for name in names if known[name]])
    save("names_gone.txt", [name for name in names if not known[name]])
    save("settings.txt", options())


if __name__ == "__main__":
    main()
