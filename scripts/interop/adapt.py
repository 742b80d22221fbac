"""Let LeRobot run beside a PyTorch for CPUs on Python 3.11: `python adapt.py SITE_PACKAGES`.

Two things are in the way, neither touches what LeRobot computes. A second run changes nothing.

1. LeRobot 0.6 asks for Python 3.12, while PyTorch's build for CPUs may be at hand for 3.11 only.
   Its sources use nothing newer than 3.11 but the syntax of a few lines: `type X = ...`,
   `class C[T]`, `def f[T]`. They are written in the older way, with the same meaning.
2. torchvision's wheel is built for CUDA; its own C++ operators (non-maximum suppression, region
   pooling) do not load beside PyTorch for CPUs, and importing it fails because it registers
   shapes for them. No policy of LeRobot calls them: the two files that register are emptied.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ALIAS = re.compile(r"^type (\w+) = ", re.M)
CLASS = re.compile(r"^class (\w+)\[([\w, ]+)\](?:\(([^)]*)\))?:", re.M)
FUNCTION = re.compile(r"^def (\w+)\[(\w+)(?:: *(\w+))?\]\(", re.M)
REGISTRATIONS = ("_meta_registrations.py", "_autograd_registrations.py")


def rewrite(source: str) -> str:
    """`source` with the older spelling of generics and type aliases."""
    names: dict[str, str] = {}

    def generic(found: re.Match[str]) -> str:
        names.update(dict.fromkeys(re.split(r", *", found[2]), ""))
        bases = f"{found[3]}, " if found[3] else ""
        return f"class {found[1]}({bases}__import__('typing').Generic[{found[2]}]):"

    def function(found: re.Match[str]) -> str:
        names[found[2]] = f", bound={found[3]}" if found[3] else ""
        return f"def {found[1]}("

    source = ALIAS.sub(r"\1 = ", source)
    source = CLASS.sub(generic, source)
    source = FUNCTION.sub(function, source)
    new = [n for n in names if not re.search(rf"^{n} = TypeVar", source, re.M)]
    lines = "".join(f'{n} = __import__("typing").TypeVar("{n}"{names[n]})\n' for n in new)
    first = re.search(r"^(?:@|class |def )", source, re.M)
    return source if first is None else source[: first.start()] + lines + source[first.start() :]


def rewrite_syntax(folder: Path) -> int:
    """Rewrite the files below `folder` that this Python cannot parse; returns how many."""
    changed = 0
    for file in sorted(folder.rglob("*.py")):
        source = file.read_text()
        try:
            ast.parse(source)
        except SyntaxError:
            file.write_text(rewrite(source))
            ast.parse(file.read_text())
            changed += 1
    return changed


def silence_registrations(torchvision: Path) -> bool:
    """Empty the files that register shapes of operators, where the operators do not load."""
    command = [sys.executable, "-c", "import torchvision"]
    result = subprocess.run(command, capture_output=True, text=True)
    if "operator torchvision::" not in result.stderr:
        return False
    for name in REGISTRATIONS:
        (torchvision / name).write_text('"""Left out: the operators do not load here."""\n')
    return True


def main(site_packages: Path) -> None:
    changed = rewrite_syntax(site_packages / "lerobot")
    print(f"lerobot: the syntax of {changed} files was rewritten for Python {sys.version[:4]}")
    if silence_registrations(site_packages / "torchvision"):
        print("torchvision: without its C++ operators, which need CUDA")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
