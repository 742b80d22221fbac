"""What a dataset of LeRobot's layout says of its columns is what is read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodied.commands.train import train
from embodied.core import checkpoint
from embodied.core.spec import DEPTH, Leaf, Spec, SpecMismatch
from embodied.core.text import encode
from embodied.datasets.editing.check import CheckConfig
from embodied.datasets.editing.edit import checked, drop, merge, numbered
from embodied.datasets.lerobot.pictures import LazyPictures
from embodied.datasets.lerobot.reader import EpisodeWriter, read_episodes, salvage
from embodied.datasets.lerobot.schema import DatasetError
from embodied.datasets.lerobot.video import decode_image, encode_png
from embodied.datasets.transitions import human_steps
from embodied.nn.sentences import sentence_vectors
from embodied.serve.policy_service import PolicyService
from embodied.serve.protocol import RequestError
from tests.builders import exit_of, recorded

pytest.importorskip("av")

H, W, LENGTH = 6, 8, 5
DATA = "data/chunk-000/file-000.parquet"
INDEX = "meta/episodes/chunk-000/file-000.parquet"
SMALL = ("learner=imitate", "size=debug", "steps=2")
ACT = Leaf((2,), names=("x", "y"))
CAMERA = "observation.images.eye"


def write(folder: Path, obs: dict[str, tuple[Leaf, torch.Tensor]], act: Leaf = ACT) -> Path:
    """Two episodes of LENGTH steps: for each observation its leaf and values [LENGTH + 1, ...]."""
    spec = Spec({name: leaf for name, (leaf, _) in obs.items()}, act, dt=0.1)
    with EpisodeWriter(folder, spec, "arm", "png") as writer:
        for number in range(2):
            action = torch.linspace(0, 1, LENGTH)[:, None].expand(-1, 2) + number
            values = {name: value for name, (_, value) in obs.items()}
            writer.add(recorded(values, action.contiguous()), "push")
    return folder


def foreign(folder: Path, change: Callable[[dict[str, Any]], None] = lambda features: None) -> Path:
    """The dataset without what LeRobot does not know, with changed features."""
    file = folder / "meta" / "info.json"
    info = json.loads(file.read_text())
    info.pop("embodied", None)
    change(info["features"])
    file.write_text(json.dumps(info))
    table = pq.read_table(folder / INDEX)
    final = [name for name in table.column_names if name.startswith("final/")]
    pq.write_table(table.drop_columns(final), folder / INDEX)
    return folder


def replace_column(folder: Path, name: str, values: list[Any], kind: Any = None) -> None:
    table = pq.read_table(folder / DATA)
    column = pa.array(values, kind or table.schema.field(name).type)
    if name in table.column_names:
        table = table.set_column(table.column_names.index(name), name, column)
    else:
        table = table.append_column(name, column)
    pq.write_table(table, folder / DATA)


def cells(folder: Path, picture: np.ndarray, **settings: Any) -> None:
    """Every picture of the camera becomes `picture`, as a PNG."""
    sink = io.BytesIO()
    imageio.imwrite(sink, picture, extension=".png", **settings)
    replace_column(folder, CAMERA, 2 * LENGTH * [{"bytes": sink.getvalue(), "path": None}])


def info_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert exit_of("demos", "info", folder) == 0
    return capsys.readouterr().out


DISTANCES = (0.3 + 0.002 * torch.arange(LENGTH + 1)).view(-1, 1, 1, 1).expand(-1, H, W, 1)
EYE = (Leaf((H, W, 3), "uint8"), torch.full((LENGTH + 1, H, W, 3), 90, dtype=torch.uint8))


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    return write(tmp_path / "seen", {"eye": EYE, "state": (Leaf((2,)), torch.zeros(LENGTH + 1, 2))})


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    leaf = Leaf((H, W, 1), low=0.0, unit=DEPTH)
    return write(tmp_path / "deep", {"eye": (leaf, DISTANCES.contiguous())})


@pytest.mark.parametrize("theirs", [False, True])
def test_distances_are_metres(
    theirs: bool, deep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """300, 302, 304 mm were read modulo 256."""
    if theirs:
        foreign(deep)
    whole, lazy = read_episodes(deep), read_episodes(deep, memory_mb=1e-4)
    assert whole.spec.obs["eye"] == Leaf((H, W, 1), low=0.0, unit=DEPTH)
    torch.testing.assert_close(whole.steps["obs/eye"][:LENGTH], DISTANCES[:LENGTH].contiguous())
    pictures = lazy.steps["obs/eye"]
    assert isinstance(pictures, LazyPictures) and pictures.dtype == torch.float32
    torch.testing.assert_close(pictures.load()[LENGTH:], DISTANCES[:LENGTH])
    assert "eye float32[6, 8, 1]" in info_says(deep, capsys)
    assert checked(deep, CheckConfig())[0] == []
    assert salvage(deep, tmp_path / "copy") == 2
    copy = read_episodes(tmp_path / "copy")
    assert torch.equal(copy.steps["obs/eye"], whole.steps["obs/eye"])


def test_a_policy_sees_distances(deep: Path, tmp_path: Path) -> None:
    words = ("policy=flow", *SMALL, "data.random_shift=1", f"demos={foreign(deep)}")
    policy = checkpoint.load_policy(train([*words, f"out={tmp_path / 'run'}"]))
    assert policy.spec.obs["eye"].is_depth
    served = PolicyService(policy)
    picture = np.full((H, W, 1), 0.3, np.float32)
    assert served.infer({"eye": picture})["actions"].shape[1] == 2
    with pytest.raises(RequestError, match="distances in m"):
        served.infer({"eye": (1000 * picture).astype(np.uint16)})


def test_sixteen_bits_without_a_word_are_refused_and_the_advice_works(deep: Path) -> None:
    foreign(deep, lambda features: features[CAMERA].pop("info"))
    with pytest.raises(DatasetError, match="does not say what they are") as error:
        read_episodes(deep)
    assert "file-000.parquet: episode 0, step 0" in str(error.value)
    advice = json.loads(str(error.value).partition('"info": ')[2].partition(" into")[0])
    foreign(deep, lambda features: features[CAMERA].update(info=advice))
    assert read_episodes(deep).steps["obs/eye"][1].unique().item() == pytest.approx(0.302)


def test_sixteen_bits_of_a_file_stay() -> None:
    """Cells of HDF5 files and goal pictures are opened by the same function."""
    distances = torch.full((H, W, 1), 0.3)
    found = decode_image(encode_png(distances))
    assert found.dtype == torch.int32 and (found == 300).all() and found.shape == (H, W, 1)


@pytest.mark.parametrize(
    ("names", "shape", "cell", "read"),
    [
        (["c", "h", "w"], [3, H, W], (H, W, 3), 3),
        (["rgb", "height", "width"], [3, H, W], (H, W, 3), 3),
        (["channel", "height", "width"], [3, H, W], (H, W, 3), 3),
        (None, [3, H, W], (H, W, 4), 3),  # colours with alpha
        (["height", "width"], [H, W], (H, W), 1),
        (None, [7, H, W], (H, W, 3), None),
    ],
)
def test_the_channel_is_where_the_names_or_the_shape_say(
    names: Any, shape: list[int], cell: tuple[int, ...], read: int | None, seen: Path
) -> None:
    cells(seen, np.full(cell, 90, np.uint8))
    foreign(seen, lambda features: features[CAMERA].update(names=names, shape=shape))
    if read is None:
        with pytest.raises(DatasetError, match=r"images.eye is a picture of shape \[7, 6, 8\]"):
            read_episodes(seen)
    else:
        assert torch.equal(
            read_episodes(seen).steps["obs/eye"],
            torch.full((2 * LENGTH, H, W, read), 90, dtype=torch.uint8),
        )


def test_a_cell_with_a_path_reads_the_file(seen: Path) -> None:
    imageio.imwrite(seen / "one.png", np.full((H, W, 3), 33, np.uint8))
    replace_column(foreign(seen), CAMERA, 2 * LENGTH * [{"bytes": None, "path": "one.png"}])
    assert (read_episodes(seen).steps["obs/eye"] == 33).all()
    assert checked(seen, CheckConfig())[0] == []
    (seen / "one.png").unlink()
    with pytest.raises(DatasetError, match=r"episode 0, step 0: observation.images.eye: .*one.png"):
        read_episodes(seen)


@pytest.mark.parametrize(("shape", "found"), [((7, W, 3), "7, 8, 3"), ((H, W), "6, 8, 1")])
def test_another_shape_is_one_line(shape: tuple[int, ...], found: str, seen: Path) -> None:
    cells(foreign(seen), np.full(shape, 9, np.uint8))
    line = rf"file-000.parquet: episode 0, step 0: {CAMERA} is \[{found}\], not \[6, 8, 3\]"
    with pytest.raises(DatasetError, match=line) as error:
        read_episodes(seen)
    assert "\n" not in str(error.value)
    assert any(f"{CAMERA} is" in finding.what for finding in checked(seen, CheckConfig())[0])


def test_tasks_that_are_not_listed_are_those_of_the_steps(seen: Path) -> None:
    """LeRobot's conversion of pictures to films leaves them out of meta/episodes."""
    foreign(seen)
    pq.write_table(pq.read_table(seen / INDEX).drop_columns(["tasks"]), seen / INDEX)
    assert read_episodes(seen).texts == ("push", "push")
    assert drop(seen, seen.with_name("out"), numbered("0")).episodes == 1
    assert read_episodes(seen.with_name("out")).texts == ("push",)


def test_hidden_observations_stay_hidden(tmp_path: Path) -> None:
    """LeRobot takes whatever begins with observation. and every picture for an input, and drops our
    key."""
    leaf, numbers = Leaf((2,)), torch.rand(LENGTH + 1, 2)
    obs = {name: (leaf, numbers) for name in ("state", "privileged/state", "critic/load")}
    deep = (Leaf((H, W, 1), low=0.0, unit=DEPTH), DISTANCES.contiguous())
    obs |= {"privileged/picture": EYE, "critic/depth": deep}
    folder = write(tmp_path / "demos", obs)
    features = json.loads((folder / "meta" / "info.json").read_text())["features"]
    assert {"privileged.state", "critic.load", "observation.state"} <= features.keys()
    assert not {"image", "video"} & {feature["dtype"] for feature in features.values()}
    assert salvage(folder, tmp_path / "copy") == 2
    ours, copy = read_episodes(folder), read_episodes(tmp_path / "copy")
    theirs, lazy = read_episodes(foreign(folder)), read_episodes(folder, memory_mb=1e-4)
    assert checked(folder, CheckConfig())[0] == []
    for key in (f"obs/{name}" for name in obs):
        (leaf, value), read = obs[key[4:]], ours.steps[key]
        torch.testing.assert_close(read[:LENGTH], value[:LENGTH])
        there = theirs.spec.obs[key[4:]]
        assert (there.shape, there.dtype, there.unit) == (leaf.shape, leaf.dtype, leaf.unit)
        assert torch.equal(theirs.steps[key], read) and torch.equal(copy.steps[key], read)
        pictures = lazy.steps[key]
        assert isinstance(pictures, LazyPictures) == leaf.is_picture
        again = pictures.load() if isinstance(pictures, LazyPictures) else pictures
        assert torch.equal(again, read)
    run = train(["policy=flow", *SMALL, f"demos={folder}", f"out={tmp_path / 'run'}"])
    assert PolicyService(checkpoint.load_policy(run)).infer({"state": np.zeros(2)})


def test_corrections_of_hil_serl_are_a_persons(seen: Path) -> None:
    name = "complementary_info.is_intervention"
    replace_column(seen, name, LENGTH * [[True]] + LENGTH * [[False]], pa.list_(pa.bool_(), 1))
    feature = {"dtype": "bool", "shape": [1], "names": None}
    foreign(seen, lambda features: features.update({name: feature}))
    assert human_steps(read_episodes(seen)).tolist() == LENGTH * [True] + LENGTH * [False]


def test_columns_that_are_no_numbers_are_left_out_and_named(
    seen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = pa.list_(pa.struct([("role", pa.string())]))
    replace_column(seen, "language_events", 2 * LENGTH * [[{"role": "user"}]], kind)
    feature = {"dtype": "language", "shape": [1], "names": None}
    foreign(seen, lambda features: features.update(language_events=feature))
    assert "language_events" not in read_episodes(seen).steps
    assert "not read language_events (language)" in info_says(seen, capsys)


def test_a_class_is_a_class_and_a_count_a_number(tmp_path: Path) -> None:
    def integers(values: list[int], name: str) -> Path:
        state = {"state": (Leaf((2,)), torch.rand(LENGTH + 1, 2))}
        folder = write(tmp_path / name, state)
        replace_column(folder, "action", values, pa.int64())
        feature = {"dtype": "int64", "shape": [1], "names": None}
        return foreign(folder, lambda features: features.update(action=feature))

    classes = integers([0, 1, 2, 1, 0] * 2, "classes")
    episodes = read_episodes(classes)
    assert episodes.spec.act == Leaf((), "int64", 0, 2)
    assert episodes.steps["action"].tolist() == [0, 1, 2, 1, 0] * 2
    run = train(["policy=categorical", *SMALL, f"demos={classes}", f"out={tmp_path / 'run'}"])
    assert checkpoint.load_policy(run).spec.act.high == 2
    counts = read_episodes(integers([2000 + i for i in range(2 * LENGTH)], "counts"))
    assert counts.spec.act.dtype == "float32" and counts.steps["action"][3].item() == 2003


def two_tasks(folder: Path, episodes: int = 8) -> Path:
    """The state says nothing of the action, the sentence all; the last episode has both."""
    spec = Spec({"state": Leaf((2,))}, ACT, dt=0.1)
    with EpisodeWriter(folder, spec) as writer:
        for number in range(episodes):
            words = [("left", "right")[number % 2]] * 10
            if number == episodes - 1:
                words[5:] = ["left"] * 5
            sign = torch.tensor([1.0 if word == "right" else -1.0 for word in words])
            state = torch.rand(11, 2, generator=torch.Generator().manual_seed(number))
            action = sign[:, None] * (0.5 + 0.1 * torch.rand(10, 2))
            writer.add(recorded({"state": state}, action), words)
    return foreign(folder)


LISTENER = ("policy=deterministic", "learner=imitate", "size=debug", "steps=150")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_tasks(tmp_path_factory.mktemp("said") / "demos")


def test_every_step_keeps_its_sentence(
    said: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = read_episodes(said)
    assert episodes.words()[60:] == 10 * ("left",) + 5 * ("right",) + 5 * ("left",)
    assert episodes.texts[6:] == ("left", "right")
    out = info_says(said, capsys)
    assert "45 steps: left" in out and "35 steps: right" in out
    merge([said, said], tmp_path / "both")
    assert read_episodes(tmp_path / "both").words() == 2 * episodes.words()
    assert salvage(said, tmp_path / "copy") == 8
    assert read_episodes(tmp_path / "copy").words() == episodes.words()
    with EpisodeWriter(tmp_path / "new", episodes.spec) as writer:
        writer.add(episodes.episode(7), episodes.text(7))
        assert read_episodes(tmp_path / "new").words() == episodes.words()[70:]  # still pending


def test_a_policy_listens(said: Path, tmp_path: Path) -> None:
    run = train([*LISTENER, f"demos={said}", f"out={tmp_path / 'run'}"])
    policy = checkpoint.load_policy(run)
    assert policy.spec.tasks == ("left", "right") and policy.spec.listens
    served = PolicyService(policy)
    state = np.full(2, 0.5)
    left, right = (
        served.infer({"state": state, "prompt": word})["actions"][0] for word in policy.spec.tasks
    )
    assert (left < -0.3).all() and (right > 0.3).all()
    with pytest.raises(RequestError, match="never saw the prompt 'up', it knows 'left', 'right'"):
        served.infer({"state": state, "prompt": "up"})
    with pytest.raises(RequestError, match="say what to do: prompt='left' or 'right'"):
        served.infer({"state": state})


def test_an_observed_sentence_is_heard_as_the_instruction(tmp_path: Path) -> None:
    spec = Spec({"state": Leaf((2,)), "said": Leaf((8,), "uint8", unit="text")}, ACT, dt=0.1)
    with EpisodeWriter(tmp_path / "data", spec) as writer:
        for word in ("left", "right"):
            seen = {"state": torch.rand(11, 2), "said": encode([word] * 11, 8)}
            writer.add(recorded(seen, torch.rand(10, 2)), word)
    words = [*LISTENER[:3], "steps=2", f"demos={tmp_path / 'data'}", f"out={tmp_path / 'run'}"]
    policy = checkpoint.load_policy(train(words))
    assert set(policy.spec.obs) == {"state", "instruction"} and policy.spec.listens


def test_sentences_that_mean_the_like_are_near() -> None:
    pytest.importorskip("all_minilm_l6_v2")
    near, same, far = sentence_vectors(["pick up the cup", "grasp the cup", "close the drawer"])
    assert near @ same > 0.6 > 0.4 > near @ far


@pytest.mark.usefixtures("tiny_encoder")
@pytest.mark.parametrize("how", ["vector", "ignore"])
def test_sentences_become_vectors_or_are_ignored(how: str, said: Path, tmp_path: Path) -> None:
    steps = "steps=150" if how == "vector" else "steps=2"
    words = [*LISTENER[:3], steps, f"demos={said}", f"out={tmp_path / 'run'}"]
    policy = checkpoint.load_policy(train([*words, f"instruction={how}"]))
    served = PolicyService(policy)
    left, right = (
        served.infer({"state": np.zeros(2), "prompt": word})["actions"][0]
        for word in ("left", "right")
    )
    if how == "vector":
        assert policy.spec.obs["instruction"].shape == (384,) and policy.spec.listens
        assert (left < -0.3).all() and (right > 0.3).all()
    else:
        assert list(policy.spec.obs) == ["state"] and policy.spec.tasks == ("left", "right")
        assert (left == right).all()
    with pytest.raises(RequestError, match="never saw the prompt 'up'"):
        served.infer({"state": np.zeros(2), "prompt": "up"})


@pytest.mark.usefixtures("tiny_encoder")
def test_vectors_of_sentences_have_length_one_whatever_is_beside_them() -> None:
    one, _ = both = sentence_vectors(["left", "a longer sentence"])
    assert both.norm(dim=1).tolist() == pytest.approx([1, 1])
    torch.testing.assert_close(sentence_vectors(["left"])[0], one)  # padding has no effect


def elements(folder: Path, names: tuple[str, ...]) -> Path:
    """One state and action, whose elements are 1, 2, 3 for a, b, c."""
    value = {"a": 1.0, "b": 2.0, "c": 3.0, "": 4.0}
    row = torch.tensor([value[name[:1]] for name in names or ("a", "b", "c")])
    leaf = Leaf((3,), names=names)
    spec = Spec({"state": leaf}, leaf, dt=0.1)
    with EpisodeWriter(folder, spec) as writer:
        for number in range(2):
            state = row.expand(LENGTH + 1, 3) + 0.01 * number
            writer.add(recorded({"state": state}, state[1:].clone()))
    return folder


def test_elements_of_several_datasets_are_joined_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = elements(tmp_path / "ours", ("a", "b", "c"))

    def joined(name: str, names: tuple[str, ...]) -> Any:
        theirs = elements(tmp_path / name, names)
        run = train(
            ["policy=flow", *SMALL, f"demos=[{ours},{theirs}]", f"out={tmp_path / f'run_{name}'}"]
        )
        return checkpoint.load_policy(run)

    policy = joined("turned", ("c", "a", "b"))
    assert policy.spec.act.names == ("a", "b", "c")
    ranges = policy.node["action"], policy.node["obs"]["state"]
    assert all(max(each["high"]) - min(each["low"]) < 2.2 for each in ranges)
    for each in ranges:
        middle = [(a + b) / 2 for a, b in zip(each["low"], each["high"], strict=True)]
        assert middle == pytest.approx([1.005, 2.005, 3.005], abs=0.01)
    assert "trusted" not in capsys.readouterr().err
    with pytest.raises(SpecMismatch, match="state has the elements a, b, cc, and a, b, c are"):
        joined("other", ("a", "b", "cc"))
    joined("plain", ())
    assert "action have no names: their order is trusted" in capsys.readouterr().err
