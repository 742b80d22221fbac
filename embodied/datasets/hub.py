"""Datasets of the Hugging Face hub: `hf://owner/name@revision`, downloaded once into its cache.

Only datasets that are named this way reach the network. HF_ENDPOINT, HF_HOME, HF_TOKEN and
HF_HUB_OFFLINE are those of huggingface_hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from embodied.core.build import ConfigError, needed

SCHEME = "hf://"
NAME = re.compile(r"(?:datasets/)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
NO_NETWORK = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout")
FILES = ("meta/*", "meta/**/*", "data/**/*", "videos/**/*", "images/**/*", "collect.yaml")


def local_folder(given: str) -> Path:
    """The folder of a dataset: `given` itself, or the downloaded copy of `hf://owner/name`. Without
    a revision it is the hub's newest, and is looked up each time. ConfigError, in one line, for a
    dataset that cannot be had."""
    if not given.startswith(SCHEME):
        return Path(given)
    matched = NAME.fullmatch(given.removeprefix(SCHEME))
    if matched is None:
        raise ConfigError(
            f"{given} is no dataset of the hub: hf://owner/name or @revision after it"
        )
    return _downloaded(given, matched[1], matched[2])


def _downloaded(given: str, name: str, revision: str | None) -> Path:
    hub = needed("huggingface_hub", "hf:// needs huggingface_hub", "hub")
    try:
        folder = hub.snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=list(FILES)
        )
    except Exception as error:  # of huggingface_hub, of its HTTP client, of the disk
        raise ConfigError(_line(given, name, revision, error)) from error
    if not (Path(folder) / "meta" / "info.json").exists():
        raise ConfigError(f"{given} holds no LeRobot dataset (there is no meta/info.json)")
    return Path(folder)


def _line(given: str, name: str, revision: str | None, error: Exception) -> str:
    """The one line for a download that failed."""
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "GatedRepoError"):
        return f"{given}: the hub has no such dataset for you; is it private? hf auth login"
    if kind == "RevisionNotFoundError":
        return f"{given}: {name} has no revision {revision}; leave @{revision} out for its newest"
    if kind in NO_NETWORK:
        return (
            f"{given}: the hub cannot be reached and there is no downloaded copy; connect, or copy "
            "the dataset here and give its folder: demos=DIR"
        )
    reason = str(error).strip().splitlines()
    return f"{given} cannot be downloaded ({kind}: {reason[0] if reason else ''})"
