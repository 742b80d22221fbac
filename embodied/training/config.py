"""RunConfig: the settings of a training run; `data` holds those of its training regime only.

Offline     updates from a fixed dataset; no environment steps
OffPolicy   environment steps fill a replay buffer; updates sample from it
OnPolicy    every update uses the newest environment steps, once
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, cast

from embodied.core import distributed
from embodied.core.bounds import (
    Bound,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
)
from embodied.core.build import ConfigError, Node, kind_of, parse, plain, shown, typed
from embodied.core.device import pick_device, replaced
from embodied.datasets.mapping import Statistics
from embodied.learners.learner import Learner, RunPlan

Regime = Literal["offline", "off_policy", "on_policy"]


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out initial states.

    In an environment with held-out tasks: one episode each of the first `episodes`.
    """

    episodes: Count = 200  # of one evaluation
    num_envs: Count = 50  # parallel envs of the evaluation
    seed: CountOrZero = 10_000  # of the initial states, the same in every evaluation
    shared: bool = False  # in the training's environment: for a simulator of one instance
    grid: CountOrZero = 0  # values per task parameter: one episode per task of this grid (0: none)
    env: Node | None = None  # of env=imagined: the real environment, evaluated in beside it


@dataclass(frozen=True)
class Pairs:
    """Labelled pairs of segments of a dataset, for a learner that learns from such pairs."""

    labeller: Node  # compares two segments (embodied.rewards.preferences.labellers)
    count: Count = 1000  # pairs that are labelled
    picture: str | None = None  # image leaf that the labeller sees; null: the only one


@dataclass(frozen=True)
class Offline:
    """Updates from a fixed dataset. `steps` of the run count updates.

    Normalizers are fitted to the dataset, but for those of `init`. Without an environment (`demos=`
    and no `env=`) actions and observations are normalised by `statistics` of the dataset, and the
    run is evaluated on episodes that are held out, at least one.
    """

    regime: ClassVar[Regime] = "offline"
    random_shift: CountOrZero = 0  # maximum random shift of the images of a batch, pixels (DrQ-v2)
    statistics: Statistics = "quantiles"  # without env=: what is -1 and +1 of each element
    held_out: Annotated[float, Bound(0.0, 0.9)] = 0.1  # without env=: share of episodes not trained
    fractions: tuple[PositiveFraction, ...] | None = None  # of a batch, from each dataset of demos
    pairs: Pairs | None = None  # which pairs of segments are labelled; for a learner of pairs only


@dataclass(frozen=True)
class OffPolicy:
    """Environment steps fill a replay buffer, updates sample from it.

    With `demos`, the run's step counter counts `pretrain_steps` first, then environment steps.

    Actors are processes that step the environment, `env.num_envs` divided among them. With
    `max_lag` 0, a step is made when the learner has used the one before, as without actors.
    `when_behind` "skip" is for a robot, which never waits. A schedule of `utd_ratio` sees the
    metrics (`embodied.training.update_ratio`). By default normalizers are fitted where there are
    demonstrations or a warm-up, unless the policy that is trained comes from a run (`init` without
    `finetune`): it keeps its own.
    """

    regime: ClassVar[Regime] = "off_policy"
    utd_ratio: NonNegative | Node = 1.0  # updates per stored transition, or a schedule's node
    warmup_steps: CountOrZero = 0  # environment steps, usually random, before the first update
    replay_size: Count = 1_000_000  # transitions
    demo_fraction: Fraction | None = 0.5  # share of a batch from demos (null: they fill the buffer)
    success_fraction: Fraction = 0.0  # share of a batch from successful episodes, if there are any
    pretrain_steps: CountOrZero = 0  # updates from demos before the first environment step
    normalize: bool | None = None  # fit normalizers to demos, else to the warm-up (null: if any)
    random_shift: CountOrZero = 0  # maximum random shift of the images of a batch, pixels (DrQ-v2)
    imagined: Node | None = None  # updates from a model's steps, not from those of the buffer
    actors: CountOrZero = 0  # processes that step the environment (0: the process that learns)
    max_lag: CountOrZero = 1  # vector steps that the actors may be ahead of the learner
    when_behind: Literal["wait", "skip"] = "wait"  # slow learner: actors wait, or updates left out
    actors_on: Literal["here", "ray"] = "here"  # processes of this machine, or of a Ray cluster

    def __post_init__(self) -> None:
        given = [name for name in ACTORS if getattr(self, name) != getattr(OffPolicy, name)]
        if given and not self.actors:
            raise ConfigError(f"data.{given[0]} is for actors: data.actors=1")
        if self.actors_on == "ray" and self.when_behind == "skip":
            raise ConfigError(
                "data.when_behind=skip is for a robot, which joins no cluster: data.actors_on=here"
            )


ACTORS = ("max_lag", "when_behind", "actors_on")  # settings of actors


@dataclass(frozen=True)
class OnPolicy:
    """No settings: `learner.horizon` is the number of steps per update."""

    regime: ClassVar[Regime] = "on_policy"


REGIMES: dict[str, type[Offline | OffPolicy | OnPolicy]]
REGIMES = {kind.regime: kind for kind in (Offline, OffPolicy, OnPolicy)}
# Settings outside `data` that only some regimes use.
ONLY: dict[str, tuple[Regime, ...]] = {
    "replay": ("off_policy",),
    "weighting": ("offline", "off_policy"),
    "reward": ("off_policy", "on_policy"),
    "teacher": ("off_policy", "on_policy"),
}
FOR_DEMOS = {
    "demo_episodes": "demo_episodes limits the episodes read of each dataset",
    "demo_memory_mb": "demo_memory_mb is for pictures of demonstrations",
    "demo_policy_steps": "demo_policy_steps is for recordings with interventions",
    "weighting": "weighting needs demonstrations",
}
INSTEAD = {
    "reward": "embodied reward label DATASET reward=... out=DIR relabels a dataset, then demos=DIR"
}


@dataclass(frozen=True)
class RunConfig:
    """One run.

    `mapping` names what belongs together where the dataset or `init` is not of this environment
    (`embodied.datasets.mapping`). `init` is a run, a checkpoint or a policy server (ws://HOST:PORT,
    docs/remote.md); with `finetune`, it is the frozen base policy, and with a policy that wraps
    others, the one that it wraps. A frozen base whose file is larger than `copy_base_mb` is saved
    in checkpoints by path and hash. `demo_policy_steps` is for recordings that say which steps were
    a person's. Demos of several tasks without `env` add the observation `instruction`: the number
    of a step's sentence, or its vector (`embodied.nn.sentences`). A teacher chooses the tasks
    of training episodes; evaluation never uses it.
    """

    learner: Node  # how the policy is trained
    name: str  # null: the experiment's name, or ENV-POLICY-LEARNER
    out: str  # null: outputs/NAME-SEED (NAME-SIZE-SEED where the size is not full)
    steps: Count  # environment steps of all parallel envs, or updates in offline training
    data: Offline | OffPolicy | OnPolicy  # settings of the training regime
    env: Node | None = None  # the environment (null: demos alone, in the dataset's own units)
    mapping: str | None = None  # a file that joins demos or init of another origin with env
    policy: Node | None = None  # the policy
    finetune: Node | None = None  # how a frozen base policy (init) is finetuned
    reward: Node | None = None  # the reward (null: the environment's own)
    teacher: Node | None = None  # chooses training tasks (null: the environment samples them)
    replay: Node | None = None  # the replay buffer (null: uniform, in memory)
    weighting: Node | None = None  # sampling of trajectories of demos (null: by their length)
    init: str | None = None  # initialise from this run or server; with finetune: the base policy
    copy_base_mb: NonNegative = 16.0  # a smaller frozen base is copied into checkpoints, MB
    demos: str | tuple[str, ...] | None = None  # dataset folder(s), or hf://owner/name@revision
    demo_episodes: Count | None = None  # episodes read of each dataset (null: all)
    demo_memory_mb: Annotated[float, Bound(0.01)] = 1500.0  # decoded pictures kept in memory, MB
    instruction: Literal["number", "vector", "ignore"] = "number"  # how several tasks are observed
    demo_policy_steps: bool = False  # imitate also what a policy did, where people took over
    seed: CountOrZero = 0  # of initial parameters, environments and exploration
    device: str = "auto"  # auto | cpu | cuda
    threads: Count = 1  # CPU threads of torch; 1 is fastest for small networks
    deterministic: bool = False  # PyTorch's kernels only, not the fastest that this CPU has
    execute: Count | None = None  # steps executed of each action chunk (null: all)
    log_every: CountOrZero | None = None  # steps between metrics (null: 1,000; >= 10 vector steps)
    save_every: CountOrZero | None = 0  # steps between checkpoints (0: end; null: 10,000)
    eval_every: CountOrZero | None = 0  # steps between evaluations (0: end; null: as save_every)
    eval: EvalConfig = field(default_factory=EvalConfig)  # how the policy is evaluated
    log: Literal["tensorboard", "wandb"] | None = None  # where metrics go too (null: nowhere else)
    minutes: Positive | None = None  # wall time of training, which then ends; a resume goes on
    video: bool = True  # videos of evaluation episodes at the end
    resume: str | None = None  # a run or checkpoint to resume

    def __post_init__(self) -> None:
        for name, regimes in ONLY.items():
            if getattr(self, name) is not None and self.data.regime not in regimes:
                raise ConfigError(refusal(name, self.data.regime, regimes))
        if self.demos is None:
            for name, line in FOR_DEMOS.items():
                if getattr(self, name) != getattr(RunConfig, name):
                    raise ConfigError(f"{line}: demos=DIR")
        if self.instruction != "number" and (self.env is not None or self.demos is None):
            raise ConfigError(
                f"instruction={self.instruction} is for demos= without env=: an environment says "
                "itself what a policy observes"
            )
        if self.demo_policy_steps and not kind_of(self.learner, Learner).imitates():
            raise ConfigError(
                "demo_policy_steps is for a learner that imitates; this one uses all steps of "
                "demos: leave it out"
            )
        if self.env is None:
            require_dataset(self)
        elif isinstance(self.data, Offline):
            for name in ("statistics", "held_out"):
                if getattr(self.data, name) != getattr(Offline, name):
                    raise ConfigError(
                        f"data.{name} has no effect with env=, only with demos= alone"
                    )
        if isinstance(self.data, Offline) and self.data.fractions is not None:
            require_fractions(self.data.fractions, self.demos)
        if self.eval.shared:
            require_shared(self)

    @property
    def environment(self) -> Node:
        """The node of the environment, with the run's device for `device: auto`, and no native code
        if `deterministic`; ConfigError for a run without one."""
        if self.env is None:
            raise ConfigError("env is not given: env=NAME")
        node = replaced(self.env, "native", True, False) if self.deterministic else self.env
        return replaced(node, "device", "auto", str(pick_device(self.device)))

    @property
    def pretrain_steps(self) -> int:
        return self.data.pretrain_steps if isinstance(self.data, OffPolicy) else 0

    @property
    def total_steps(self) -> int:
        return self.pretrain_steps + self.steps

    @property
    def normalizes(self) -> bool:
        """Off-policy: whether normalizers are fitted to demonstrations or to the warm-up."""
        assert isinstance(self.data, OffPolicy)
        if self.data.normalize is not None:
            return self.data.normalize
        known = self.demos is not None or self.data.warmup_steps > 0
        return known and (self.init is None or self.finetune is not None)

    def plan(self, chunk: int) -> RunPlan:
        """What the learner may know of the run, whose policy decides `chunk` steps at once."""
        data = self.data
        updates = self.total_steps
        decisions = self.steps // (self.execute or chunk) // distributed.world()
        if isinstance(data, OffPolicy):
            learning = max(1 - data.warmup_steps / self.steps, 0.0)
            if isinstance(data.utd_ratio, dict):
                updates = 0
            else:
                updates = data.pretrain_steps + round(data.utd_ratio * learning * decisions)
        return RunPlan(updates, decisions, self.execute)


def require_shared(config: RunConfig) -> None:
    """ConfigError where the training's environment cannot be used to evaluate in."""
    if config.env is None:
        raise ConfigError("eval.shared needs an environment: env=NAME")
    actors = isinstance(config.data, OffPolicy) and config.data.actors
    for name, used in {"teacher": config.teacher, "data.actors": actors}.items():
        if used:
            raise ConfigError(f"{name} needs another environment to evaluate in: eval.shared=false")


def require_dataset(config: RunConfig) -> None:
    """ConfigError for what a run without an environment cannot do."""
    if config.demos is None:
        raise ConfigError(
            "env is not given: env=NAME, or demos=DIR to imitate a dataset without one"
        )
    rows = kind_of(config.learner, Learner).rows
    if config.data.regime != "offline" or rows != "chunks":
        raise ConfigError(
            "a dataset without an environment can be imitated, and this learner does not: choose "
            "one that does (embodied list learners), or give env=NAME and mapping=FILE"
        )
    given = {"finetune": config.finetune, "mapping": config.mapping, "eval.grid": config.eval.grid}
    for name in (name for name, value in given.items() if value):
        raise ConfigError(f"{name} needs an environment: env=NAME")


def require_fractions(fractions: tuple[float, ...], demos: str | tuple[str, ...] | None) -> None:
    """ConfigError unless there is one fraction per dataset, and they sum to 1."""
    count = 0 if demos is None else 1 if isinstance(demos, str) else len(demos)
    if len(fractions) != count or abs(sum(fractions) - 1) > 1e-3:
        raise ConfigError(
            f"data.fractions={list(fractions)} should be one share of a batch for each of the "
            f"{count} datasets of demos, and sum to 1",
            key="fractions",
            value=fractions,
        )


def refusal(name: str, regime: str, regimes: tuple[str, ...]) -> str:
    """The error line for setting `name`, which has no effect in `regime`, only in `regimes`."""
    where = " or ".join(f"data={each}" for each in regimes)
    instead = f"; {INSTEAD[name]}" if name in INSTEAD and regime == "offline" else ""
    training = f"{regime.replace('_', '-')} training"
    return f"{name} has no effect in {training}, only with {where}{instead}"


def regime_of(node: Mapping[str, Any]) -> Regime:
    """The training regime of a run's settings, by default the one that its learner declares."""
    data = node.get("data") or {}
    if not isinstance(data, str | Mapping):
        raise ConfigError(f"data should be a regime ({', '.join(REGIMES)}), not {shown(data)}")
    regime = data if isinstance(data, str) else cast(Node, data).get("regime", "auto")
    if regime in (None, "auto"):
        regime = str(kind_of(node.get("learner"), Learner).data)
    return typed(Regime, regime, "data.regime")


def read_config(node: Mapping[str, Any]) -> RunConfig:
    """A run's settings, checked; raises ConfigError for a wrong setting and one without effect.
    `node["data"]` is a mapping with `regime` and the regime's settings, or a regime's name, or
    missing (the learner's regime)."""
    regime = regime_of(node)
    given = node.get("data") or {}
    given = {} if isinstance(given, str) else {k: v for k, v in given.items() if k != "regime"}
    for name in given:
        homes = [key for key, kind in REGIMES.items() if name in settings_of(kind)]
        if homes and regime not in homes:
            raise ConfigError(refusal(f"data.{name}", regime, tuple(homes)))
    return parse(RunConfig, {**node, "data": parse(REGIMES[regime], given, "data", ".")}, "run")


def settings_of(kind: type) -> list[str]:
    """The names of a regime's settings."""
    return [each.name for each in fields(kind)]


def as_node(config: RunConfig) -> Node:
    """The settings as plain nested dictionaries, as they are written to run.yaml."""
    data = {"regime": config.data.regime, **asdict(config.data)}
    return plain({**asdict(config), "data": data})


SENTENCES = ("prompt", "sentence", "text", "goal")
"""Settings of a node that say in words what is wanted."""


def facts(config: RunConfig) -> dict[str, str]:
    """What is said of a run before it begins."""
    finetune, demos = config.finetune, config.demos
    unit = "updates" if config.data.regime == "offline" else "environment steps"
    before = f"{config.pretrain_steps:,} updates, then " if config.pretrain_steps else ""
    said = {
        "run": f"{config.name}, seed {config.seed}",
        "env": described(config.env),
        "policy": described(config.policy),
        "finetune": f"{described(finetune)} of {config.init}" if finetune else None,
        "from": None if finetune else config.init,
        "learner": described(config.learner),
        "reward": described(config.reward),
        "teacher": described(config.teacher),
        "training": config.data.regime.replace("_", "-"),
        "demos": demos if isinstance(demos, str) else ", ".join(demos or ()),
        "mapping": config.mapping,
        "device": f"{pick_device(config.device)}, {config.threads} thread(s)",
        "steps": f"{before}{config.steps:,} {unit}",
        "folder": config.out,
    }
    return {name: value for name, value in said.items() if value}


def described(node: Node | None) -> str:
    if not node:
        return ""
    keys = ("task", "id", "chunk", "num_envs", "batch_size")
    shown = [f"{key}={node[key]}" for key in keys if node.get(key) is not None]
    shown += [f'"{node[k]}"' for k in SENTENCES if isinstance(node.get(k), str) and node[k]]
    return f"{str(node['_target_']).rpartition('.')[2]} {' '.join(shown)}".strip()
