"""Runs a training, of any method, from its configuration to the run folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import yaml

from embodied.core import distributed, formats, run_packages
from embodied.core.device import seed_everything
from embodied.core.errors import RemoteError, RobotError
from embodied.training import warning_signs
from embodied.training.components import RunComponents
from embodied.training.config import as_node, read_config
from embodied.training.logger import Log, read_metrics
from embodied.training.trainer import Callback, Trainer, intervals


def train(node: dict[str, Any], log: Log, callback: Callback | None = None) -> Path:
    """Train with the settings `node` (the fields of RunConfig); returns the run folder. Writes
    `run.yaml`, checkpoints, metrics and a video. A run interrupted by Ctrl-C saves a checkpoint,
    raises KeyboardInterrupt and can be resumed bit for bit (on the CPU). Each process of torchrun
    has its own environments and replay buffer, and only the first one writes. A resumed run loads
    the saved replay buffer in all processes and resets the environments of the others."""
    config = read_config(node)
    first = distributed.start() == 0
    seed_everything(config.seed)
    torch.set_num_threads(config.threads)
    folder = Path(config.out)
    with closing(RunComponents(config)) as components:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            settings = {"format": formats.RUN, **as_node(config)}
            (folder / "run.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
            run_packages.remember(folder)
        log.fact("kernels", components.describe_kernels())
        if memory := components.loop.memory:
            log.fact("memory", memory)
        with (
            components.kernels.active(),
            _trainer(components, log, folder, first, callback) as trainer,
        ):
            try:
                components.loop.run(trainer)
            except (RobotError, RemoteError):  # the run can be resumed once it works again
                trainer.save_now()
                raise
            _finish(components, trainer, log, folder, first)
    distributed.stop()
    return folder


def _trainer(
    components: RunComponents, log: Log, folder: Path, first: bool, callback: Callback | None
) -> Trainer:
    """Counts the steps of a new or a resumed run, and evaluates and saves it."""
    config = components.config
    step = components.resume(config.resume) if config.resume else 0
    distributed.broadcast(components.learner)
    if distributed.world() > 1:
        seed_everything(distributed.own_seed(config.seed) + step)
    stride = 1 if components.env is None else components.env.num_envs * distributed.world()
    every = intervals(config.log_every, config.eval_every, config.save_every, stride)

    def evaluate(step: int) -> None:
        if first:
            found = components.evaluate(step)
            result = {f"eval/{k}": v for k, v in found.items()}
            warning_signs.log_evaluation(components.loop, log, step, result)
            if line := warning_signs.parted(found):
                log.warn(line)
            if config.eval.shared:  # the running episodes were lost
                trainer.episodes.forget(torch.arange(stride))

    def save(step: int) -> None:
        if first:
            components.save(folder, step, log.last)

    if not step:
        log.write(step, dict(components.loop.data_metrics))
    teacher = components.loop.teacher
    total, minutes = config.total_steps, config.minutes
    trainer = Trainer(log, total, every, evaluate, save, step, teacher, minutes)
    if callback is not None:
        trainer.call = lambda step: callback(step, log, components.policy)
    return trainer


def _finish(
    components: RunComponents, trainer: Trainer, log: Log, folder: Path, first: bool
) -> None:
    """The last evaluation, checkpoint and videos, unless a complete run was resumed;
    KeyboardInterrupt after Ctrl-C."""
    if trainer.interrupted:
        trainer.save_now()
        raise KeyboardInterrupt
    if trainer.step == trainer.first_step and first and log.evaluated(trainer.step):
        log.fact("complete", f"{trainer.step:,} steps; steps=N extends the run")
        return
    evaluate = trainer.every.evaluate
    try:
        if not (evaluate and trainer.step % evaluate == 0 and trainer.step > trainer.first_step):
            trainer.evaluate(trainer.step)
    finally:  # what was trained is kept, also where an episode never ends
        trainer.save_now()
    if line := warning_signs.warning(read_metrics(folder), components.learner.n_step, folder):
        log.warn(line)
    if components.config.video and first:
        components.record_videos(folder / "videos")
        components.write_reward_components(folder)
