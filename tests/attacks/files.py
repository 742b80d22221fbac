"""Files of somebody who means harm: how each is made, the door it is brought to, and a word of the
line with which that door refuses it."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

from embodied.core import checkpoint
from embodied.core.spec import Leaf, Spec
from embodied.datasets.lerobot.reader import EpisodeWriter
from embodied.envs.toy import two_gap
from tests.adopt.checkpoints import two_gap_checkpoint
from tests.builders import make_policy, node_of, recorded
from tests.foreign import as_version_2

SECRET = "/etc/passwd"
DEEP, TOO_DEEP = "[" * 300_000, "nested too deeply"
NO_FILE, NO_TYPE = "no ordinary", "no numbers of the type"  # words of lines
FLOW = "embodied.policies.generative.flow.Flow"
CAMERA = "observation.images.front"
PICTURE = Leaf((16, 16, 3), "uint8", 0, 255)
SPEC = Spec({"state": Leaf((2,)), "front": PICTURE}, Leaf((2,), low=-1.0, high=1.0), dt=0.1)


@dataclass
class Bases:
    """Sound files that the attacks are copies of, each made once in `folder`."""

    folder: Path

    def copy(self, kind: str, to: Path) -> Path:
        """A copy of a dataset ("mp4", "png", "lerobot", "v2"), a run or a policy of LeRobot's."""
        made = self.folder / kind
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            {"run": _run, "diffusion": _policy, "act": _policy}.get(kind, self._dataset)(made)
        return Path(shutil.copytree(made, to, symlinks=True))

    def _dataset(self, folder: Path) -> None:
        if folder.name == "v2":
            as_version_2(self.copy("lerobot", self.folder / "whole"), folder)
            return
        with EpisodeWriter(folder, SPEC, images="png" if folder.name == "png" else "mp4") as writer:
            for length in (4, 6):
                seen = {"state": torch.rand(length + 1, 2)}
                seen["front"] = torch.full((length + 1, 16, 16, 3), 90, dtype=torch.uint8)
                writer.add(recorded(seen, torch.zeros(length, 2)))
        if folder.name == "lerobot":
            edit(folder / "meta/info.json", lambda info: info.pop("embodied"))


def _run(folder: Path) -> None:
    save_run(folder, "gaussian.Gaussian", hidden=[8])


def save_run(folder: Path, kind: str, **settings: Any) -> None:
    """A run of an untrained policy, with a state for its resume."""
    env = node_of("envs.toy.two_gap.TwoGap", num_envs=1)
    policy = make_policy(kind, two_gap.TwoGap(two_gap.Config(num_envs=1)).spec, **settings)
    state = {"a": torch.zeros(2)}
    checkpoint.save(folder / "checkpoints" / "00000001", policy, 1, state, {})
    (folder / "run.yaml").write_text(yaml.safe_dump({"env": env, "execute": None}))
    (folder / SAVED / "about.json").write_text('{"step": 1}')  # of a version that kept no hashes


def _policy(folder: Path) -> None:
    two_gap_checkpoint(folder, f"{folder.name}_numbers")


@dataclass(frozen=True)
class Attack:
    """`says`: a word of the line (None: the file may also be used, if that does no harm)."""

    door: str
    make: Maker
    says: str | None
    heavy: bool = False


Content = bytes | str | Callable[[Path], object]
Maker = Callable[[Bases, Path], Path]
Table = dict[str, tuple[Any, ...]]  # the other arguments of `Attack`, by the name of the attack


def edit(file: Path, change: Callable[[Any], object]) -> None:
    node = json.loads(file.read_text())
    change(node)
    file.write_text(json.dumps(node))


def changed(kind: str, change: Callable[[Path], object]) -> Maker:
    """A sound folder in which `change` does something."""

    def make(bases: Bases, to: Path) -> Path:
        made = bases.copy(kind, to)
        change(made)
        return made

    return make


def edited(kind: str, file: str, change: Callable[[Any], object]) -> Maker:
    """A sound folder with a JSON file that is changed."""
    return changed(kind, lambda made: edit(made / file, change))


def renamed_camera(name: str, kind: str = "lerobot") -> Maker:
    """A dataset whose camera has this name, in every file that says it."""

    def change(made: Path) -> None:
        for file in made.glob("meta/*.json*"):
            file.write_text(file.read_text().replace(json.dumps(CAMERA), json.dumps(name)))
        for file in made.glob("meta/episodes/*/*.parquet"):
            table = pq.ParquetFile(file).read()
            names = [each.replace(CAMERA, name) for each in table.column_names]
            pq.write_table(table.rename_columns(names), file)
        if kind != "v2" and len(name) < 200:
            film = made / FILM.replace(CAMERA, name)
            film.parent.mkdir(parents=True, exist_ok=True)
            if not film.exists():
                shutil.copyfile(made / FILM, film)

    return changed(kind, change)


def of_file(kind: str, file: str) -> Callable[[Callable[[Any], object]], Maker]:
    """A sound folder of this kind with that JSON file changed."""
    return lambda change: edited(kind, file, change)


SAVED = "checkpoints/00000001"
CONFIG, STATS = "config.json", "policy_preprocessor.json"
info_json, old_info_json = of_file("mp4", "meta/info.json"), of_file("v2", "meta/info.json")
spec_json = of_file("run", f"{SAVED}/spec.json")
act_json, act_steps = of_file("act", CONFIG), of_file("act", STATS)
diffusion_json = of_file("diffusion", CONFIG)


def info(**settings: Any) -> Maker:
    return info_json(lambda node: node.update(settings))


def version_2(**settings: Any) -> Maker:
    return old_info_json(lambda node: node.update(settings))


def column(number: int, **settings: Any) -> Maker:
    """A dataset with other facts of one of our columns."""
    return info_json(lambda node: node["embodied"]["columns"][number].update(settings))


def put(kind: str, name: str, content: Content) -> Maker:
    """A sound folder with one file replaced: by these bytes, or by what a function puts there.
    Kind "": an empty folder; name "": the file is all there is."""

    def make(bases: Bases, to: Path) -> Path:
        if name == "":
            file = to
        elif kind:
            file = bases.copy(kind, to) / name
        else:
            file = to / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in [file] if file.is_symlink() or file.exists() else []:
            old.unlink()
        if callable(content):
            content(file)
        else:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return to

    return make


def link(target: str) -> Callable[[Path], None]:
    return lambda file: file.symlink_to(target)


def alone(suffix: str, content: Content) -> Maker:
    def make(bases: Bases, to: Path) -> Path:
        file = to.with_suffix(suffix)
        put("", "", content)(bases, file)
        return file

    return make


def policy(**settings: Any) -> Maker:
    """A run whose policy.yaml has other settings."""
    node = node_of("policies.gaussian.Gaussian") | settings
    return saved("policy.yaml", yaml.safe_dump(node))


def act(**settings: Any) -> Maker:
    """An ACT policy of LeRobot's with other settings."""
    return act_json(lambda node: node.update(settings))


def saved(name: str, content: Content) -> Maker:
    return put("run", f"{SAVED}/{name}", content)


def demos(name: str, content: Content) -> Maker:
    return put("mp4", name, content)


def weights(content: Content) -> Maker:
    return saved("policy.safetensors", content)


def policy_text(content: Content) -> Maker:
    return saved("policy.yaml", content)


def about(content: Content) -> Maker:
    return saved("about.json", content)


def action(**settings: Any) -> Maker:
    """A run whose spec.json has another action."""
    return spec_json(lambda node: node["act"].update(settings))


def references(*entries: dict[str, Any]) -> Maker:
    filled = [{"part": "base", "relative": "x", "sha256": "0" * 64, **one} for one in entries]
    return saved("references.json", json.dumps(filled))


def torched(value: Any) -> Callable[[Path], None]:
    return lambda file: torch.save(value, file)


class Bomb:
    """What pickle would call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch $PWNED/pwned",)


def header(size: int, there: int | None = None) -> Callable[[Path], None]:
    """A safetensors file that says it has a header of `size` bytes, and has `there` zeros."""

    def write(file: Path) -> None:
        with file.open("wb") as sink:
            sink.write(struct.pack("<Q", size))
            sink.truncate(8 + min(size, 100) if there is None else 8 + there)

    return write


def tensors(about: Mapping[str, Any]) -> Callable[[Path], None]:
    """A safetensors file with a header only."""
    text = json.dumps(about).encode()

    def write(file: Path) -> None:
        file.write_bytes(struct.pack("<Q", len(text)) + text)

    return write


def float_of(shape: list[int], end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}


def laughs(key: str) -> str:
    """YAML in which each line is ten times the one before."""
    lines = [f"a0: &a0 [{', '.join(['lol'] * 10)}]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    return "\n".join([*lines, f"{key}: *a9", ""])


def column_of(kind: str, files: str, name: str, value: Any, type: Any = None) -> Maker:
    """A dataset with `value` in every row of the column whose name ends so."""

    def change(made: Path) -> None:
        (file,) = made.glob(files)
        table = pq.ParquetFile(file).read()
        at = next(i for i, each in enumerate(table.column_names) if each.endswith(name))
        column = pa.array([value] * table.num_rows, type)
        pq.write_table(table.set_column(at, table.column_names[at], column), file)

    return changed(kind, change)


def cells(content: Any) -> Maker:
    cell = content if isinstance(content, dict) else {"bytes": content, "path": None}
    type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return column_of("png", "data/*/*.parquet", CAMERA, cell, type)


def index(name: str, value: Any) -> Maker:
    """A dataset whose index says `value` of every episode."""
    return column_of("mp4", "meta/episodes/*/*.parquet", name, value)


def png(width: int, height: int, frames: int = 0) -> bytes:
    """A PNG file that says it has this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    many = chunk(b"acTL", struct.pack(">II", frames, 0)) if frames else b""
    rows = chunk(b"IDAT", zlib.compress(bytes(3 * 16 * 16 + 16)))
    return b"\x89PNG\r\n\x1a\n" + head + many + rows + chunk(b"IEND", b"")


def repeated(file: Path) -> None:
    """A small Parquet file: a value of 1 MB, 10,000 times."""
    same = pa.array([0] * 10_000, pa.int32())
    words = pa.DictionaryArray.from_arrays(same, pa.array([b"x" * 2**20]))
    table = pa.table({"task_index": same.cast(pa.int64()), "task": words})
    pq.write_table(table, file, dictionary_pagesize_limit=2**22, store_schema=False)


def constant(file: Path) -> None:
    """A small Parquet file of 2 * 10^8 numbers."""
    numbers = pa.array(np.zeros(10**7, np.int64))
    with pq.ParquetWriter(file, pa.schema([("episode_index", pa.int64())])) as sink:
        for _ in range(20):
            sink.write_table(pa.table({"episode_index": numbers}))


DATA, FILM = "data/chunk-000/file-000.parquet", f"videos/{CAMERA}/chunk-000/file-000.mp4"
VICTIM = "observation.images.x/../../../victim/videos/observation.images.front"
HLS = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"
DASH = (
    '<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period><AdaptationSet><Representation id="1">'
    "<BaseURL>http://127.9.9.9:1/</BaseURL></Representation></AdaptationSet></Period></MPD>"
)
SDP = "v=0\nc=IN IP4 127.9.9.9\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"


def lines(name: str, edit: Callable[[Any], object]) -> Maker:
    """A dataset of version 2 with other lines in a list."""

    def change(made: Path) -> None:
        file = made / "meta" / f"{name}.jsonl"
        nodes = [json.loads(line) for line in file.read_text().splitlines()]
        for node in nodes:
            edit(node)
        file.write_text("".join(f"{json.dumps(node)}\n" for node in nodes))

    return changed("v2", change)


def zarr(which: str = "data/action", chunk: Content | None = None, **settings: Any) -> Maker:
    """A replay buffer of which one array has other settings, another `chunk`."""

    def make(bases: Bases, to: Path) -> Path:
        for name in ("meta/episode_ends", "data/action", "data/state"):
            flat = name == "meta/episode_ends"
            array = np.array([4]) if flat else np.zeros((4, 1))
            about = {"zarr_format": 2, "shape": array.shape, "chunks": array.shape, "order": "C"}
            about |= {"dtype": array.dtype.str, "compressor": None, "filters": None}
            (to / name).mkdir(parents=True)
            (to / name / ("0" if flat else "0.0")).write_bytes(array.tobytes())
            if name == which:
                about |= settings
                if chunk is not None:
                    put("", "0.0", chunk)(bases, to / name)
            (to / name / ".zarray").write_text(json.dumps(about))
        return to

    return make


def compressed(kind: str, data: bytes, place: str = "compressor") -> Maker:
    """One whose numbers are compressed by a codec, to `data`."""
    codec: Any = {"id": kind} if place == "compressor" else [{"id": kind}]
    return zarr(chunk=data, **{place: codec})


def rlds(features: str, data: bytes) -> Maker:
    def make(bases: Bases, to: Path) -> Path:
        to.mkdir()
        (to / "features.json").write_text(features)
        (to / "a-train.tfrecord").write_bytes(data)
        return to

    return make


COLUMNS = {
    name: {"tensor": {"shape": {}, "dtype": "float32"}} for name in ("action", "observation/x")
}
STEP = {"featuresDict": {"features": COLUMNS}}
STEPS = json.dumps({"featuresDict": {"features": {"steps": {"sequence": {"feature": STEP}}}}})
ZSTD = bytes.fromhex("28b52ffd e0") + struct.pack("<Q", 2**40) + b"x" * 9


TWO = json.dumps({"type": "Discrete", "n": 2, "start": 0})
ENV = json.dumps({"id": "evil:Env-v0"})
EVIL = json.dumps({"observation_space": TWO, "action_space": TWO, "env_spec": ENV})


def hdf5(change: Callable[[Any, Path], object], kind: str = ".hdf5") -> Maker:
    """A file of robomimic's with one demonstration, whose `obs/a` is made by `change`."""

    def make(bases: Bases, to: Path) -> Path:
        path = to.with_suffix(kind)
        with h5py.File(path, "w") as file:
            data = file.create_group("data")
            data.attrs["env_args"] = "{}"
            demo = data.create_group("demo_0")
            for name in ("rewards", "dones"):
                demo[name] = np.zeros(4)
            demo["actions"] = np.zeros((4, 2))
            change(demo.create_group("obs"), to.parent)
        return path

    return make


def outside_numbers(obs: Any, _: Path) -> None:
    obs.create_dataset("a", (4, 8), "u1", external=[("/etc/passwd", 0, 32)])


def virtual(obs: Any, _: Path) -> None:
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource("/tmp/other.hdf5", "a", (4,))
    obs.create_virtual_dataset("a", layout)


def same_picture(obs: Any, _: Path) -> None:
    """Ten times a picture of 67 million pixels."""
    from PIL import Image

    made = obs.create_dataset("a", (10,), h5py.vlen_dtype(np.uint8))
    sink = io.BytesIO()
    Image.new("RGB", (8192, 8192)).save(sink, "png")
    for row in range(10):
        made[row] = np.frombuffer(sink.getvalue(), np.uint8)


def mjcf(inside: str, head: str = "") -> Maker:
    """An MJCF file with one joint and this in its world."""
    arm = '<body name="a"><joint name="j" range="-1 1"/><geom size=".1"/></body>'
    text = f"<mujoco>{head}<worldbody>{arm}{inside}</worldbody></mujoco>"
    return alone(".xml", text)


def asset(text: str) -> Maker:
    return mjcf("", f"<asset>{text}</asset>")


def linked(target: Any) -> Callable[[Any, Path], object]:
    return lambda obs, _: obs.__setitem__("a", target)


def deep_env_info(bases: Bases, to: Path) -> Path:
    to.with_suffix(".json").write_text(DEEP)
    return hdf5(lambda obs, _: None, ".h5")(bases, to)


def many_tensors(file: Path) -> None:
    tensors({f"t{i}": float_of([0], 0) for i in range(300_000)})(file)


def few_columns(file: Path) -> None:
    pq.write_table(pa.table({"episode_index": [0, 1], "length": [4, 6]}), file)


BALL = '<body><geom size=".1"/></body>'
ENTITIES = (
    '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    '<robot name="&b;"><link name="x"/></robot>'
)


SECRET_ENTITY = '<!DOCTYPE a [<!ENTITY a SYSTEM "/etc/passwd">]><robot name="a">&a;</robot>'
PATH_IN_STUDY = "metric: x\nseeds: [0]\nvariants: {'../../victim': experiment=pendulum_sac}\n"
OLD_FILM = f"videos/chunk-000/{CAMERA}/episode_000000.mp4"
OLD_DATA = "data/chunk-000/episode_000000.parquet"
ELSEWHERE = "../../etc/x.safetensors"
WIDE = {"observation.images.a": {"type": "VISUAL", "shape": [3, 100_000, 8]}}


# By its door: the attack, its file, and a word of the line (`Attack`).
ATTACKS_AT: dict[str, Table] = {
    "load": {
        "header of 99 MB": (weights(header(99_000_000, 99_000_000)), "header"),
        "header of 2^62": (weights(header(2**62)), "header"),
        "tensor of 2^60": (weights(tensors({"a": float_of([2**60], 2**62)})), "damaged"),
        "300,000 tensors": (weights(many_tensors), "header"),
        "pickle for weights": (weights(pickle.dumps(Bomb())), "damaged"),
        "laughs in policy.yaml": (policy_text(laughs("hidden")), "more than"),
        "YAML tag": (policy_text("!!python/object/apply:os.system [id]"), "YAML"),
        "200,000 levels of JSON": (saved("spec.json", DEEP), TOO_DEEP),
        "20,000 levels of YAML": (policy_text("[" * 20_000), "YAML"),
        "base that is a device": (references({"file": "/dev/zero"}), "not there"),
        "base that is a secret": (references({"file": "/etc/shadow"}), "not there"),
        "spec of 2^31": (action(shape=[2**31]), NO_TYPE),
        "two huge layers": (policy(hidden=[200_000, 200_000]), "at most 8192"),
        "90,000 layers": (policy(hidden=[1] * 90_000), "describes a network"),
        "spec.json is a pipe": (saved("spec.json", os.mkfifo), NO_FILE),
        "policy.yaml is a device": (policy_text(link("/dev/zero")), NO_FILE),
        "about.json is cut": (about('{"format'), "damaged"),
        "weights are a pipe": (weights(os.mkfifo), NO_FILE),
        "about.json is a device": (about(link("/dev/zero")), "damaged"),
        "weights of 2^43 in no blocks": (
            weights(lambda f: (header(2**20)(f), os.truncate(f, 2**43))),
            "free",
        ),
        "type that is a function": (action(dtype="load"), NO_TYPE),
        "spec without an action": (spec_json(lambda node: node.pop("act")), "damaged"),
        "policy.yaml of 2 MB": (policy_text("# " + "x" * 2**21), "may have"),
        "number of a million digits": (policy_text(f"a: {'9' * 10**6}"), "YAML"),
        "mapping that contains itself": (policy_text("&a {_target_: x, b: *a}"), "contains itself"),
        "format of 400 digits": (
            about(json.dumps({"format": 10**400})),
            "about.json cannot be read",
        ),
        "sampler of 10^9 steps": (policy(_target_=FLOW, steps=10**9), "steps"),
        "net of 10^9 units": (policy(_target_=FLOW, width=10**9), "at most 8192"),
        "100,000 references": (references(*[{"file": "/a"}] * 100_000), "not there"),
    },
    "state": {
        "pickle for a state": (saved("learner.pt", torched({"x": Bomb()})), "learner.pt"),
        "state is a pipe": (saved("learner.pt", os.mkfifo), NO_FILE),
        "state that is nested": (saved("learner.pt", torched(["x"])), None),
    },
    "eval": {
        "laughs in run.yaml": (put("run", "run.yaml", laughs("env")), "more than"),
        "run.yaml is a pipe": (put("run", "run.yaml", os.mkfifo), NO_FILE),
        "about.json is deep": (about(DEEP), "about.json cannot be read"),
    },
    "export": {"weights are a device": (weights(link("/dev/zero")), NO_FILE)},
    "view": {"shape of texts": (action(shape=["x"]), NO_TYPE)},
    "metrics": {
        "metrics that are deep": (put("run", "metrics.jsonl", f"{DEEP}\n"), None),
        "metrics are a pipe": (put("run", "metrics.jsonl", os.mkfifo), NO_FILE),
    },
    "model": {
        "model without files": (
            put("", "model.yaml", "_target_: embodied.models.ensemble.Ensemble"),
            "damaged",
        )
    },
    "classifier": {
        "classifier of texts": (put("", "card.json", '{"training": 1}'), "card.json"),
        "classifier's card is deep": (put("", "card.json", DEEP), "card.json"),
    },
    "adopt": {
        "class for a type": (act(type="os.system"), "adopted are"),
        "type that is a mapping": (act(type={"_target_": "os.system"}), "type"),
        "processor with a path of Python": (
            act_steps(lambda c: c["steps"].append({"class": "os.system"})),
            "is not adopted",
        ),
        "statistics elsewhere": (
            act_steps(lambda c: [s.update(state_file=ELSEWHERE) for s in c["steps"]]),
            "outside",
        ),
        "activation that is code": (act(feedforward_activation="__import__"), "activation"),
        "backbone that is code": (act(vision_backbone="os.system"), None),
        "LeRobot's weights are a pickle": (
            put("act", "model.safetensors", pickle.dumps(Bomb())),
            "safetensors",
        ),
        "deep config.json": (put("act", CONFIG, DEEP), TOO_DEEP),
        "action of 2^40": (
            act_json(lambda c: c["output_features"]["action"].update(shape=[2**40])),
            "features",
        ),
        "10^7 layers": (act(n_encoder_layers=10**7), "network"),
        "tokens of 10^6 units": (act(dim_model=10**6), "at most 8192"),
        "chunk of 10^9": (act(chunk_size=10**9), "config.json"),
        "n_obs_steps in words": (act(n_obs_steps="text"), "config.json"),
        "10^9 levels of noise": (
            diffusion_json(lambda c: c.update(num_train_timesteps=10**9)),
            "steps",
        ),
        "number that is infinite": (act(dim_model=float("inf")), "damaged"),
        "config.json is a pipe": (put("act", CONFIG, os.mkfifo), NO_FILE),
        "picture of 10^5 pixels a side": (
            diffusion_json(lambda c: c["input_features"].update(WIDE)),
            "features",
        ),
    },
    "drop": {
        "camera's name is a path": (renamed_camera(VICTIM), "no path"),
        "no files in a chunk": (info(chunks_size=0), "chunks_size"),
        "Parquet of a value 10,000 times": (demos("meta/tasks.parquet", repeated), "memory"),
        "own column's name is a path": (column(1, name=VICTIM), "no path"),
        "film is a link to a secret": (demos(FILM, link("/etc/passwd")), "outside"),
        "film is a pipe": (demos(FILM, os.mkfifo), "file"),
        "more of meta is a secret": (demos("meta/more.json", link("/etc/passwd")), "outside"),
        "more of meta is a pipe": (demos("meta/more.json", os.mkfifo), NO_FILE),
        "tasks are garbage": (demos("meta/tasks.parquet", b"PAR1" * 9), "damaged"),
        **{
            f"camera {name[:20]!r}": (renamed_camera(name), "no path")
            for name in ("/tmp/x", "..", "a\\b", "a\nb", "x" * 10_000)
        },
    },
    "info": {
        "10^18 episodes": (info(total_episodes=10**18), "promises"),
        "column of 2^40": (column(0, shape=[2**40]), NO_TYPE),
        "type of a column is a function": (column(0, dtype="load"), NO_TYPE),
        "deep info.json": (demos("meta/info.json", DEEP), TOO_DEEP),
        "picture of 20,000 pixels a side": (cells(png(20_000, 20_000)), "picture"),
        "film is a link to a device": (demos(FILM, link("/dev/zero")), "outside"),
        "steps are a link to a device": (demos(DATA, link("/dev/zero")), "outside"),
        "steps are a pipe": (demos(DATA, os.mkfifo), NO_FILE),
        "info.json is a pipe": (demos("meta/info.json", os.mkfifo), NO_FILE),
        "picture elsewhere": (cells({"bytes": None, "path": "../../../../etc/passwd"}), "outside"),
        "picture at a path": (cells({"bytes": None, "path": "/etc/passwd"}), "outside"),
        "picture is PostScript": (
            cells(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n"),
            CAMERA,
        ),
        "picture is a film": (cells(png(16, 16, frames=2**20)), "one picture"),
        "picture is 9,000 pixels wide": (cells(png(9_000, 1)), "one picture"),
        "index of texts": (index("data/file_index", "../../x"), ""),
        "index before the first file": (index("data/file_index", -1), ""),
        "episodes of 10^12 steps": (index("length", 10**12), "promises"),
        "film begins nowhere": (index("from_timestamp", float("nan")), ""),
        "period of no time": (info(fps=0), "fps"),
        "period of NaN": (info(fps=float("nan")), "fps"),
        "features are a list": (info(features=[1]), "info.json"),
        "info.json is a list": (demos("meta/info.json", "[1]"), "info.json"),
        "own entry is empty": (info(embodied={}), "info.json"),
        "waiting episode is garbage": (demos("pending/episode-000002.parquet", b"PAR1"), "damaged"),
        "index without columns": (
            demos("meta/episodes/chunk-000/file-000.parquet", few_columns),
            "",
        ),
        "Parquet of 2 * 10^8 numbers": (demos(DATA, constant), "memory", True),
    },
    "check": {
        "film is HLS of a server": (demos(FILM, HLS.format("http://127.9.9.9:1/a.ts")), None),
        "film is HLS of a file": (demos(FILM, HLS.format("/etc/passwd")), None),
        "film is DASH": (demos(FILM, DASH), None),
        "film is SDP": (demos(FILM, SDP), None),
        "film is ffconcat": (demos(FILM, "ffconcat version 1.0\nfile /etc/passwd\n"), None),
        "info.json is a device": (demos("meta/info.json", link("/dev/zero")), NO_FILE),
        "picture is HTML": (cells(b"<html>"), "exit 1"),
    },
    "lerobot": {
        "path that asks for attributes": (
            version_2(data_path="{video_key.__class__.__init__.__globals__}"),
            "no path of files",
        ),
        "path of 10^9 zeros": (
            version_2(data_path="{episode_index:01000000000d}"),
            "no path of files",
        ),
        "path of steps elsewhere": (version_2(data_path="../../../etc/passwd"), "outside"),
        "path of films is absolute": (version_2(video_path="/etc/passwd"), "outside"),
        "old camera's name is a path": (renamed_camera(VICTIM, "v2"), "no path"),
        "old episodes of 10^18 steps": (
            lines("episodes", lambda n: n.update(length=10**18)),
            "steps",
        ),
        "old episodes without numbers": (
            lines("episodes", lambda n: n.pop("episode_index")),
            "cannot be read",
        ),
        "old tasks in words": (
            lines("tasks", lambda n: n.update(task_index="x")),
            "cannot be read",
        ),
        "old film is a secret": (put("v2", OLD_FILM, link(SECRET)), "outside"),
        "old steps are a pipe": (put("v2", OLD_DATA, os.mkfifo), NO_FILE),
    },
    "zarr": {
        "compression is a pickle": (compressed("pickle", pickle.dumps(Bomb())), "codec"),
        "filter is a pickle": (compressed("pickle", pickle.dumps(Bomb()), "filters"), "codec"),
        "codec of texts": (compressed("json2", b"[]"), "codec"),
        "zstd of 2^40": (compressed("zstd", ZSTD), "decompressed"),
        "zlib of 100 MB": (compressed("zlib", zlib.compress(bytes(10**8))), "decompressed"),
        "blosc of 2^31": (
            compressed("blosc", b"\2\1\1\1" + struct.pack("<III", 2**31 - 1, 0, 16)),
            "decompressed",
        ),
        "chunks elsewhere": (zarr(dimension_separator="/../../"), "damaged"),
        "chunk is a secret": (zarr(chunk=link("/etc/passwd")), "outside"),
        "chunk is a pipe": (zarr(chunk=os.mkfifo), NO_FILE),
        "10^12 numbers that were not written": (zarr("data/state", shape=[4, 10**12]), "memory"),
        "action of 10^12 elements": (zarr(shape=[4, 10**12]), "elements"),
        "10^8 chunks": (zarr("data/state", shape=[4, 10**8], chunks=[1, 1], dtype="|u1"), "chunks"),
        "chunks of nothing": (zarr(chunks=[0, 1]), "damaged"),
        "numbers that are objects": (zarr(dtype="|O"), ""),
    },
    "rlds": {
        "record of 2^63": (rlds(STEPS, struct.pack("<Q", 2**63) + b"0000"), "cut off"),
        "number without an end": (
            rlds(STEPS, struct.pack("<Q", 10**6) + b"0000" + b"\xff" * 10**6 + b"0000"),
            "",
        ),
        "deep features.json": (rlds(DEEP, b""), TOO_DEEP),
    },
    "robomimic": {
        "HDF5 that is garbage": (alone(".hdf5", b"\x89HDF\r\n\x1a\n" * 9), "HDF5"),
        "link into another file": (hdf5(linked(h5py.ExternalLink(SECRET, "/a"))), "another file"),
        "numbers of another file": (hdf5(outside_numbers), "another file"),
        "10^11 rows": (
            hdf5(lambda o, _: o.create_dataset("a", (10**11, 1), "f8", chunks=(1000, 1))),
            "memory",
        ),
        "deep env_args": (
            hdf5(lambda o, _: o.file["data"].attrs.modify("env_args", "[" * 60_000)),
            TOO_DEEP,
        ),
        "numbers of a virtual dataset": (hdf5(virtual), "another file"),
        "name that leads in a circle": (hdf5(lambda obs, _: obs.__setitem__("a", obs)), TOO_DEEP),
        "link that leads in a circle": (hdf5(linked(h5py.SoftLink("/data/demo_0/obs/a"))), ""),
        "HDF5 is a device": (alone(".hdf5", link("/dev/zero")), NO_FILE),
        "large picture ten times": (hdf5(same_picture), "", True),
    },
    "minari": {
        "deep metadata.json": (put("", "metadata.json", DEEP), TOO_DEEP),
        "environment of Minari's that is code": (put("", "metadata.json", EVIL), ""),
    },
    "maniskill": {"deep env_info": (deep_env_info, TOO_DEEP)},
    "describe": {
        "include of a secret": (mjcf("", '<include file="/etc/passwd"/>'), ""),
        "mesh elsewhere": (asset('<mesh name="m" file="../../../etc/passwd"/>'), ""),
        "plugin": (mjcf("", '<extension><plugin plugin="evil.so"/></extension>'), "plugin"),
        "memory of 1,000 GB": (mjcf("", '<size memory="1000G"/>'), None),
        "10^9 copies": (mjcf(f'<replicate count="1000000000">{BALL}</replicate>'), "replicate"),
        "laughs in a URDF": (alone(".urdf", ENTITIES), ""),
        "secret in a URDF": (alone(".urdf", SECRET_ENTITY), ""),
        "copies of copies": (
            mjcf('<replicate count="1000">' * 3 + BALL + "</replicate>" * 3),
            "replicate",
        ),
        "copies behind a quoted bracket": (
            mjcf(f'<replicate sep=">" count="&#49;000000000">{BALL}</replicate>'),
            "replicate",
        ),
        "cloth of 10^9 points": (
            mjcf('<flexcomp name="f" type="grid" count="1000 1000 1000" dim="3"/>'),
            "flexcomp",
        ),
        "texture of 10^10 pixels": (
            asset('<texture name="t" type="2d" builtin="flat" width="100000" height="100000"/>'),
            "texture",
        ),
        "ground of 10^10 points": (
            asset('<hfield name="h" nrow="100000" ncol="100000" size="1 1 1 1"/>'),
            "hfield",
        ),
        "10^9 numbers of a user": (mjcf("", '<size nuserdata="1000000000"/>'), "size"),
        "tag without an end": (alone(".xml", "<mujoco><size " * 10_000), "XML"),
    },
    "arm": {
        "arm file of 100,000 levels": (alone(".yaml", "[" * 100_000), "cannot be read"),
        "arm file is a pipe": (alone(".yaml", os.mkfifo), "cannot be read"),
    },
    "study": {
        "variant's name is a path": (alone(".yaml", PATH_IN_STUDY), "no path"),
        "laughs in a study": (alone(".yaml", laughs("variants")), ""),
        "YAML tag in a study": (alone(".yaml", "!!python/object/apply:os.system [id]"), "YAML"),
        "deep study": (alone(".yaml", DEEP), "YAML"),
    },
}
ATTACKS = {  # by the name of the attack
    name: Attack(door, *made) for door, table in ATTACKS_AT.items() for name, made in table.items()
}
