"""Datasets of the hub, from a local server that speaks its HTTP interface."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from embodied.core.build import ConfigError
from embodied.datasets.hub import local_folder
from tests.builders import python
from tests.foreign import foreign_two_gap
from tests.tiers import only_all

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v3.0", COMMIT)
SCRIPT = """
import sys
from embodied.cli import main
from embodied.datasets.hub import local_folder
from embodied.datasets.lerobot.reader import read_episodes
for given in sys.argv[1:]:
    try:
        folder = local_folder(given)
        print(folder, len(read_episodes(folder)))
    except Exception as error:
        print(mistake(error))
main(["demos", "info", sys.argv[1]])
"""


class Hub(BaseHTTPRequestHandler):
    """The requests of `snapshot_download`: a repository's files, and each file."""

    folder: Path
    asked: list[str]

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.asked.append(self.path)
        files = {str(p.relative_to(self.folder)): p for p in self.folder.rglob("*") if p.is_file()}
        path = self.path.partition("?")[0]
        revision = path.removeprefix("/api/datasets/me/gap/revision/")
        name = path.split("/", 6)[-1]
        if revision in REVISIONS:
            about = {"id": "me/gap", "sha": COMMIT, "private": False, "tags": []}
            about["siblings"] = [{"rfilename": name} for name in files]
            self._send(json.dumps(about | {"downloads": 0, "likes": 0}).encode())
        elif path.startswith("/api/datasets/me/gap/tree/"):
            self._send(json.dumps([_entry(*each) for each in files.items()]).encode())
        elif path.startswith("/datasets/me/gap/resolve/") and name in files:
            data = files[name].read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            self._send(data, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})
        else:
            missing = "RevisionNotFound" if revision != path else "RepoNotFound"
            self._send(b"{}", {"X-Error-Code": missing}, status=404)

    def _send(self, data: bytes, more: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**(more or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def _entry(name: str, file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    digest = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": digest}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    Hub.folder = foreign_two_gap(tmp_path_factory.mktemp("hub") / "gap", 3)
    (Hub.folder / "train.py").write_text("raise SystemExit('never downloaded')")
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def asked(endpoint: str, home: Path, *given: str) -> list[str]:
    """A line for each, and what `demos info` says of the first. huggingface_hub reads its settings
    when it is imported: in a process of its own."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    done = python("-c", SCRIPT, *given, **settings, HF_HUB_OFFLINE="0", HF_TOKEN="")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def nowhere() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@only_all
def test_a_dataset_is_downloaded_once_and_kept(hub: str, tmp_path: Path) -> None:
    """What the hub does not have, or nobody can ask it for, is one line."""
    found, info = asked(hub, tmp_path, "hf://me/gap@v3.0")[:2]
    folder, count = found.rsplit(maxsplit=1)
    assert count == "3" and COMMIT in folder
    assert info.startswith("hf://me/gap@v3.0: 3 episodes")
    assert not (Path(folder) / "train.py").exists()
    before = len(Hub.asked)
    given = (f"hf://me/gap@{COMMIT}", "hf://me/gap@v9", "hf://me/cup")
    again, revision, repository = asked(hub, tmp_path, *given)[:3]
    assert again == found
    assert not [path for path in Hub.asked[before:] if "/resolve/" in path]
    assert "has no revision v9; leave @v9 out" in revision
    assert "no such dataset for you" in repository
    offline, unknown = asked(nowhere(), tmp_path, "hf://me/gap@v3.0", "hf://me/gap")[:2]
    assert offline == found
    assert "cannot be reached and there is no downloaded copy" in unknown


def test_only_hf_reaches_the_network(tmp_path: Path) -> None:
    assert local_folder(str(tmp_path)) == tmp_path
    for wrong in ("hf://", "hf://gap", "hf://me/gap@", "hf://me/gap/more", "hf://../x y"):
        with pytest.raises(ConfigError, match="hf://owner/name"):
            local_folder(wrong)
