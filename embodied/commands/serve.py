"""Serve a policy to other processes."""

from __future__ import annotations

import argparse
import threading

import torch

from embodied.commands import yaml_values
from embodied.compose import allow_from
from embodied.core import checkpoint
from embodied.core.build import parse
from embodied.core.device import pick_device
from embodied.policies.abilities import with_real_time_chunking
from embodied.serve.start import Settings, lines, serving


def run(args: argparse.Namespace) -> None:
    allow_from(args.words)
    settings = parsed(args.words)
    torch.set_num_threads(settings.threads)
    saved = checkpoint.find(args.names[0])
    policy = checkpoint.load_policy(saved, device=pick_device(settings.device))
    if settings.chunks is not None:
        policy = with_real_time_chunking(policy, settings.chunks)
    with serving(policy, settings) as server:
        for line in lines(policy, saved, server, settings):
            print(line, flush=True)
        threading.Event().wait()  # until Ctrl-C


def parsed(words: list[str]) -> Settings:
    given = yaml_values(word for word in words if not word.startswith("allow="))
    return parse(Settings, given, "serve")
