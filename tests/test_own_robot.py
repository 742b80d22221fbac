"""docs/own_robot.md does what it says: its files, its commands, in a folder of their own. Capsules
are left out (tests/real_robot/test_describe.py fits some) and a busy machine is given time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.builders import ROOT, shell, write_files
from tests.tiers import only_all

PAGE = (ROOT / "docs" / "own_robot.md").read_text()
FILES = dict(re.findall(r"```\w+ file=(\S+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))
STEPS = re.split(r"\n(?=embodied )", COMMANDS.strip())
PATIENTLY = '"robot.fresh={hold: 1.0, stop: 10.0, state: 5.0}"'


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder after the page's first command."""
    folder = tmp_path_factory.mktemp("own")
    tern = (ROOT / "docs" / "own_robot" / "tern.urdf").read_text()
    write_files(folder, {**FILES, "my_arm.urdf": tern})
    said = shell(folder, f"{STEPS[0]} capsules=false")
    assert "6 joints from base_link to tool" in said and "mine/robot/my_arm.yaml" in said
    return folder


@only_all  # its parts: tests/real_robot/test_describe.py, test_deploy.py
def test_the_page_runs(described: Path) -> None:
    assert len(STEPS) == 4
    for number, deploy in enumerate(STEPS[1:]):
        folder = described / f"d{number}"
        folder.mkdir(mode=0o700)
        said = shell(described, f"{deploy} {PATIENTLY} folder={folder}")
        if "dry=true" not in deploy:
            assert "success  1 of 1" in said
    summary = json.loads((described / "outputs" / "first" / "summary.json").read_text())
    assert summary["episodes"][0]["recorded"] and summary["problem"] == ""


def test_a_driver_that_is_not_allowed_is_refused(described: Path) -> None:
    with pytest.raises(AssertionError, match=r'allow=\["my_lab"\]'):
        shell(
            described,
            STEPS[2].replace('"allow=[my_lab]" ', "").replace("outputs/dry", "outputs/no"),
        )
