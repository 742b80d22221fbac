"""RunConfig: the settings of a training run; `data` holds those of its training regime only.

Offline     updates from a fixed dataset; no environment steps
OffPolicy   environment steps fill a replay buffer; updates sample from it
OnPolicy    every update uses the newest environment steps, once
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, cast

from embodied.core.build import ConfigError, Node, nearest, parse, plain, resolve
from embodied.core.device import on_device, pick_device, without_native
from embodied.datasets.ranges import Statistics
from embodied.learners.learner import Learner, RunPlan

Regime = Literal["offline", "off_policy", "on_policy"]


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out initial states: `episodes` from `seed`, in `num_envs` parallel envs.

    `grid` > 0 evaluates one episode of each task on a grid with that many values of every task
    parameter. In an environment with held-out tasks: one episode each of the first `episodes`.
    """

    episodes: int = 200
    num_envs: int = 50
    seed: int = 10_000
    grid: int = 0

    def __post_init__(self) -> None:
        require(self, "eval.", episodes=(1, None), num_envs=(1, None), grid=(0, None))


@dataclass(frozen=True)
class Offline:
    """`random_shift`: maximum random shift of the images of a batch, in pixels (DrQ-v2).

    `steps` of the run count updates. Normalizers are always fitted to the dataset.

    Without an environment (`demos=` and no `env=`) actions and observations are normalised by
    `statistics` of the dataset: what is -1 and +1 of each element. `held_out` of the episodes, and
    at least one, are not trained on: the run is evaluated on them.
    """

    regime: ClassVar[Regime] = "offline"
    random_shift: int = 0
    statistics: Statistics = "quantiles"
    held_out: float = 0.1

    def __post_init__(self) -> None:
        require(self, "data.", random_shift=(0, None), held_out=(0, 0.9))


@dataclass(frozen=True)
class OffPolicy:
    """`utd_ratio`: updates per stored transition. `warmup_steps`: environment steps of the policy's
    warm-up (usually random actions) before the first update. `replay_size`: transitions.

    With `demos`: `demo_fraction` of every batch are demonstrations (None: they are put into the
    replay buffer instead), and `pretrain_steps` updates from them come before the first environment
    step; the run's step counter counts these, then environment steps.

    `success_fraction` of every batch are transitions of successful episodes, once there are any.
    `normalize`: fit the normalizers to demonstrations, else to the transitions of the warm-up.
    `random_shift`: maximum random shift of the images of a batch, in pixels (DrQ-v2).

    `actors`: processes that step the environment, `env.num_envs` divided among them (0: the
    learner's own). They may be `max_lag` vector steps ahead of the learner (0: a step is made when
    the learner has used the one before, as without actors). When the learner is slower, the actors
    wait (`when_behind` "wait"), or updates are left out (`skip`: a robot never waits). `actors_on`:
    processes of this machine ("here"), or actors of a Ray cluster ("ray").
    """

    regime: ClassVar[Regime] = "off_policy"
    utd_ratio: float = 1.0
    warmup_steps: int = 0
    replay_size: int = 1_000_000
    demo_fraction: float | None = 0.5
    success_fraction: float = 0.0
    pretrain_steps: int = 0
    normalize: bool = False
    random_shift: int = 0
    actors: int = 0
    max_lag: int = 1
    when_behind: Literal["wait", "skip"] = "wait"
    actors_on: Literal["here", "ray"] = "here"

    def __post_init__(self) -> None:
        given = [name for name in ACTORS if getattr(self, name) != getattr(OffPolicy, name)]
        if given and not self.actors:
            raise ConfigError(f"data.{given[0]} is for actors: data.actors=1")
        if self.actors_on == "ray" and self.when_behind == "skip":
            raise ConfigError(
                "data.when_behind=skip is for a robot, which joins no cluster: data.actors_on=here"
            )
        require(
            self,
            "data.",
            actors=(0, None),
            max_lag=(0, None),
            utd_ratio=(0, None),
            warmup_steps=(0, None),
            replay_size=(1, None),
            demo_fraction=(0, 1),
            success_fraction=(0, 1),
            pretrain_steps=(0, None),
            random_shift=(0, None),
        )


ACTORS = ("max_lag", "when_behind", "actors_on")  # settings of actors


@dataclass(frozen=True)
class OnPolicy:
    """No settings: `learner.horizon` is the number of steps per update."""

    regime: ClassVar[Regime] = "on_policy"


REGIMES: dict[str, type[Offline | OffPolicy | OnPolicy]] = {
    "offline": Offline,
    "off_policy": OffPolicy,
    "on_policy": OnPolicy,
}
# Settings outside `data` that only some regimes use.
ONLY: dict[str, tuple[Regime, ...]] = {
    "replay": ("off_policy",),
    "weighting": ("offline", "off_policy"),
    "reward": ("off_policy", "on_policy"),
    "teacher": ("off_policy", "on_policy"),
}
INSTEAD = {
    "reward": "embodied reward label DATASET reward=... out=DIR relabels a dataset, then demos=DIR",
}


@dataclass(frozen=True)
class RunConfig:
    """One run. `steps` are environment steps, or updates where training is offline.

    `env`: None trains from `demos` alone, in the dataset's own names and physical units. `mapping`:
    a file that names what belongs together where the dataset or `init` is not of this environment
    (`embodied.datasets.mapping`).

    `deterministic`: PyTorch's own kernels only, the same on every CPU; else the run chooses the
    fastest that compute the same up to rounding (`embodied.nn.kernels`).

    `init`: a run, a checkpoint or a policy server (ws://HOST:PORT, docs/remote.md) to start from;
    with `finetune`, the frozen base policy; with a policy that wraps others, the one that it wraps.
    `copy_base_mb`: a frozen base whose file is smaller (MB) is copied into every checkpoint; a
    larger one is saved by path and hash. `demos`: a dataset folder or several, or
    `hf://owner/name@revision`, `demo_episodes` of each (None: all); more than `demo_memory_mb` of
    pictures are decoded as they are sampled. `demo_policy_steps`: learners that imitate also
    imitate steps of a policy, where recordings say which steps were a person's. `weighting`: how
    often each trajectory of the demonstrations is sampled (None: in proportion to its length).
    `replay`: the kind of replay buffer (None: uniform, in memory).

    `teacher` chooses the tasks of training episodes (None: the environment samples them);
    evaluation never uses it. `execute`: steps of an action chunk that are executed before the next
    decision (None: all). `log_every`, `save_every`, `eval_every`: intervals in steps; 0: at the end
    only; None: 1,000 and 10,000, or 10 and 100 vector steps where that is more.
    """

    learner: Node
    name: str
    out: str
    steps: int
    data: Offline | OffPolicy | OnPolicy
    env: Node | None = None
    mapping: str | None = None
    policy: Node | None = None
    finetune: Node | None = None
    reward: Node | None = None
    teacher: Node | None = None
    replay: Node | None = None
    weighting: Node | None = None
    init: str | None = None
    copy_base_mb: float = 16.0
    demos: str | tuple[str, ...] | None = None
    demo_episodes: int | None = None
    demo_memory_mb: float = 1500.0
    demo_policy_steps: bool = False
    seed: int = 0
    device: str = "auto"
    threads: int = 1
    deterministic: bool = False
    execute: int | None = None
    log_every: int | None = None
    save_every: int | None = 0
    eval_every: int | None = 0
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: bool = False
    video: bool = True
    resume: str | None = None

    def __post_init__(self) -> None:
        least = {"steps": 1, "seed": 0, "threads": 1, "demo_episodes": 1, "execute": 1}
        least |= {"demo_memory_mb": 0.01, "log_every": 0, "save_every": 0, "eval_every": 0}
        require(self, "", **{name: (low, None) for name, low in least.items()})
        for name, regimes in ONLY.items():
            if getattr(self, name) is not None and self.data.regime not in regimes:
                raise ConfigError(refusal(name, self.data.regime, regimes))
        if self.demos is None and self.demo_episodes is not None:
            raise ConfigError("demo_episodes limits the episodes read of each dataset: demos=DIR")
        if self.demos is None and self.demo_memory_mb != RunConfig.demo_memory_mb:
            raise ConfigError("demo_memory_mb is for pictures of demonstrations: demos=DIR")
        if self.demo_policy_steps:
            require_imitation(self)
        if self.env is None:
            require_dataset(self)
        elif isinstance(self.data, Offline):
            require_environment_settings(self.data)
        if self.demos is None and self.weighting is not None:
            raise ConfigError("weighting needs demonstrations: demos=DIR")

    @property
    def environment(self) -> Node:
        """The node of the environment, with the run's device for `device: auto`, and no native code
        if `deterministic`; ConfigError for a run without one."""
        if self.env is None:
            raise ConfigError("env is not given: env=NAME")
        node = without_native(self.env) if self.deterministic else self.env
        return on_device(node, pick_device(self.device))

    @property
    def pretrain_steps(self) -> int:
        """Updates before the first environment step."""
        return self.data.pretrain_steps if isinstance(self.data, OffPolicy) else 0

    @property
    def total_steps(self) -> int:
        """The final value of the run's step counter."""
        return self.pretrain_steps + self.steps

    def plan(self, chunk: int) -> RunPlan:
        """What the learner may know of the run, whose policy decides `chunk` steps at once."""
        decisions = self.steps // (self.execute or chunk)
        return RunPlan(self.total_steps, decisions, self.execute)


def require_dataset(config: RunConfig) -> None:
    """ConfigError for what a run without an environment cannot do."""
    if config.demos is None:
        raise ConfigError(
            "env is not given: env=NAME, or demos=DIR to imitate a dataset without one"
        )
    rows = resolve(config.learner["_target_"], Learner).rows
    if config.data.regime != "offline" or rows != "chunks":
        raise ConfigError(
            "a dataset without an environment can be imitated, and this learner does not: choose "
            "one that does (embodied list learners), or give env=NAME and mapping=FILE"
        )
    given = {"finetune": config.finetune, "mapping": config.mapping, "eval.grid": config.eval.grid}
    for name in (name for name, value in given.items() if value):
        raise ConfigError(f"{name} needs an environment: env=NAME")


def require_imitation(config: RunConfig) -> None:
    """ConfigError where `demo_policy_steps` has no effect."""
    if config.demos is None:
        raise ConfigError("demo_policy_steps is for recordings with interventions: demos=DIR")
    if not resolve(config.learner["_target_"], Learner).imitates():
        raise ConfigError(
            "demo_policy_steps is for a learner that imitates; this one uses all steps of demos: "
            "leave it out"
        )


def require_environment_settings(data: Offline) -> None:
    """ConfigError for settings that only a run without an environment uses."""
    for name in ("statistics", "held_out"):
        if getattr(data, name) != getattr(Offline, name):
            raise ConfigError(f"data.{name} has no effect with env=, only with demos= alone")


def require(config: Any, where: str, **bounds: tuple[float, float | None]) -> None:
    """ConfigError unless every setting named is None or within [low, high] (None: no bound)."""
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is None or (value >= low and (high is None or value <= high)):
            continue
        limits = f"at least {low:g}" if high is None else f"in [{low:g}, {high:g}]"
        raise ConfigError(f"{where}{name}={value} should be {limits}")


def refusal(name: str, regime: str, regimes: tuple[str, ...]) -> str:
    """The error line for setting `name`, which has no effect in `regime`, only in `regimes`."""
    where = " or ".join(f"data={each}" for each in regimes)
    instead = f"; {INSTEAD[name]}" if name in INSTEAD and regime == "offline" else ""
    training = f"{regime.replace('_', '-')} training"
    return f"{name} has no effect in {training}, only with {where}{instead}"


def regime_of(node: Mapping[str, Any]) -> Regime:
    """The training regime of a run's settings, by default the one that its learner declares."""
    data = node.get("data") or {}
    regime = data if isinstance(data, str) else data.get("regime", "auto")
    if regime in (None, "auto"):
        regime = str(resolve(node["learner"]["_target_"], Learner).data)
    if regime not in REGIMES:
        raise ConfigError(f'there is no data "{regime}"{nearest(regime, REGIMES)}')
    return cast(Regime, regime)


def read_config(node: Mapping[str, Any]) -> RunConfig:
    """A run's settings, checked; raises ConfigError for a wrong setting and one without effect.

    `node["data"]` is a mapping with `regime` and the regime's settings, or a regime's name, or
    missing (the learner's regime).
    """
    regime = regime_of(node)
    given = node.get("data") or {}
    given = {} if isinstance(given, str) else {k: v for k, v in given.items() if k != "regime"}
    for name in given:
        homes = [key for key, kind in REGIMES.items() if name in settings_of(kind)]
        if homes and regime not in homes:
            raise ConfigError(refusal(f"data.{name}", regime, tuple(homes)))
    data = parse(REGIMES[regime], given, "data")
    return parse(RunConfig, {**node, "data": data}, "run")


def settings_of(kind: type) -> list[str]:
    """The names of a regime's settings."""
    return [each.name for each in fields(kind)]


def as_node(config: RunConfig) -> Node:
    """The settings as plain nested dictionaries, as they are written to run.yaml."""
    data = {"regime": config.data.regime, **asdict(config.data)}
    return plain({**asdict(replace(config)), "data": data})
