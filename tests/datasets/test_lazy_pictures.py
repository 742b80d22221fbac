"""Pictures that are decoded when they are used: equal to decoding everything, in bounded memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from embodied.core.spec import Leaf, Spec
from embodied.core.tensors import Tensors
from embodied.datasets.lerobot.pictures import FrameCache, LazyPictures
from embodied.datasets.lerobot.reader import Episodes, EpisodeWriter, read_episodes
from embodied.datasets.lerobot.schema import DatasetError
from embodied.datasets.lerobot.video import FILMS, FilmReader, decode_film
from embodied.datasets.transitions import Dataset, chunks, joined, transitions
from tests.builders import recorded

pytest.importorskip("av")

H, W = 32, 48
CAMERA = Leaf((H, W, 3), "uint8", 0, 255)
OBS = {"state": Leaf((2,)), "front": CAMERA, "wrist": CAMERA}
SPEC = Spec(OBS, act=Leaf((2,), low=-1.0, high=1.0), dt=0.1)
MS = Fraction(1, 1000)
FILM = "demos/videos/observation.images.front/chunk-000/file-000.mp4"
LAZY = 0.2  # MB: 43 of these pictures


def pictures(count: int, seed: int) -> Tensor:
    """Every picture differs from its neighbours: a bright column that moves."""
    shown = torch.full((count, H, W, 3), 20 * seed % 200, dtype=torch.uint8)
    for t in range(count):
        shown[t, :, (3 * t + seed) % W] = 255
        shown[t, t % H] = 90
    return shown


def write(folder: Path, lengths: Sequence[int], images: Any = "mp4") -> Path:
    """Episodes of these lengths; the film of a camera in each session is a file of its own."""
    with EpisodeWriter(folder, SPEC, "sim", images) as writer:
        for seed, length in enumerate(lengths, len(writer)):
            obs = {"front": pictures(length + 1, seed), "wrist": pictures(length + 1, seed + 5)}
            generator = torch.Generator().manual_seed(seed)
            obs["state"] = torch.rand(length + 1, 2, generator=generator)
            writer.add(recorded(obs, torch.rand(length, 2, generator=generator)))
    return folder


@pytest.fixture(params=["mp4", "png"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write(tmp_path / "demos", (11, 30, 17), request.param)
    return write(tmp_path / "demos", (9,), request.param)


def both(folder: Path, limit: int | None = None) -> tuple[Episodes, Episodes]:
    whole, lazy = read_episodes(folder, limit), read_episodes(folder, limit, memory_mb=LAZY)
    assert not isinstance(whole.steps["obs/front"], LazyPictures)
    assert isinstance(lazy.steps["obs/front"], LazyPictures)
    return whole, lazy


@pytest.mark.parametrize("limit", [None, 2])
def test_any_rows_equal_those_decoded_at_once(folder: Path, limit: int | None) -> None:
    """Of all episodes, or of the first ones."""
    whole, lazy = both(folder, limit)
    generator = torch.Generator().manual_seed(0)
    for key in ("obs/front", "obs/wrist"):
        for _ in range(20):
            index = torch.randint(len(whole.steps[key]), (7,), generator=generator)
            found = lazy.steps[key].index_select(0, index)
            assert isinstance(found, LazyPictures)
            assert torch.equal(found.load(), whole.steps[key][index])
        assert torch.equal(lazy.steps[key][5:25:2].load(), whole.steps[key][5:25:2])
        assert torch.equal(lazy.steps[key][3], whole.steps[key][3])
        assert torch.equal(lazy.final[key[4:]].load(), whole.final[key[4:]])


def test_computing_with_them_decodes_them(folder: Path) -> None:
    whole, lazy = both(folder)
    few, same = lazy.steps["obs/front"][:6], whole.steps["obs/front"][:6]
    assert torch.equal(few.float() / 255, same.float() / 255)
    assert torch.equal(few.permute(0, 3, 1, 2), same.permute(0, 3, 1, 2))
    assert np.array_equal(few.numpy(), same.numpy())
    assert torch.equal(few.to("cpu", copy=True).clone(), same)


@pytest.mark.parametrize("kind", ["transitions", "chunks"])
def test_samples_of_learners_are_the_same(folder: Path, kind: str) -> None:
    samples: list[Tensors] = []
    for episodes in both(folder):
        all_ = joined([episodes, episodes])
        rows = chunks(all_, 4) if kind == "chunks" else transitions(all_, 0.9, n_step=3)
        torch.manual_seed(3)
        samples.append(Dataset(rows).sample(64))
    whole, lazy = samples
    assert whole.keys() == lazy.keys()
    for key, value in whole.items():
        assert type(lazy[key]) is Tensor and torch.equal(value, lazy[key]), key


def test_the_cache_keeps_the_newest_within_its_bound(folder: Path) -> None:
    lazy = read_episodes(folder, memory_mb=LAZY).steps["obs/front"]
    assert isinstance(lazy, LazyPictures)
    store = lazy.pictures.parts(lazy.rows)[0][0]
    for first in range(0, len(lazy) - 20, 5):
        lazy[first : first + 20].load()
        assert store.cache.size <= LAZY * 1e6
    hits = store.cache.hits
    lazy[first : first + 20].load()
    assert store.cache.hits == hits + 20
    (nothing := FrameCache(0)).put((0, 0), np.zeros((2, 2, 3), np.uint8))
    assert nothing.get((0, 0)) is None and nothing.size == 0


def test_more_than_fits_in_memory_is_refused_in_one_line(folder: Path) -> None:
    lazy = read_episodes(folder, memory_mb=LAZY)
    with pytest.raises(DatasetError, match="demo_episodes") as error:
        lazy.steps["obs/front"].float()
    assert "\n" not in str(error.value)


def test_one_episode_can_be_written_again(folder: Path, tmp_path: Path) -> None:
    whole, lazy = both(folder)
    with EpisodeWriter(tmp_path / "copy", SPEC, "sim", "png") as writer:
        writer.add(lazy.episode(1))
    copy = read_episodes(tmp_path / "copy")
    assert torch.equal(copy.steps["obs/front"], whole.episode(1)["obs/front"])


def film_with_rare_key_frames(file: Path, shown: Tensor, gap: float = 0.0) -> None:
    """H.264 with a key frame every 25 pictures and pictures that look ahead (B-frames), 10 a second
    with a pause of `gap` s before the 13th."""
    import av

    sink = io.BytesIO()
    with av.open(sink, "w", format="mp4") as film:
        stream = film.add_stream("libx264", rate=10, options={"g": "25", "bf": "2", "crf": "10"})
        stream.height, stream.width, stream.pix_fmt = H, W, "yuv420p"
        stream.time_base = stream.codec_context.time_base = MS
        for number, picture in enumerate(shown.numpy()):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = 100 * number + round(1000 * gap) * (number > 11), MS
            film.mux(stream.encode(frame))
        film.mux(stream.encode(None))
    file.write_bytes(sink.getvalue())


def test_random_access_where_key_frames_are_rare(tmp_path: Path) -> None:
    file = tmp_path / "film.mp4"
    film_with_rare_key_frames(file, pictures(80, 1))
    whole = torch.stack(list(decode_film(file)))
    for keys in (True, False):  # PyAV before 18 does not tell where the key frames are
        reader = FilmReader(file, 10.0)
        reader.keys = reader.keys if keys else None
        for number in [0, 79, 3, 4, 5, 30, 29, 77, 78, 51, 26, 25, 24, *range(40, 60)]:
            found = torch.from_numpy(reader.picture(number / 10))
            assert torch.equal(found, whole[number]), number
        with pytest.raises(DatasetError, match=r"no picture at 9\.000 s"):
            reader.picture(9.0)
        reader.close()


def test_a_row_has_the_picture_of_its_time_not_of_its_number(tmp_path: Path) -> None:
    """A recording that paused for half a second, in the film and in the table."""
    write(tmp_path / "demos", (30,))
    file = tmp_path / FILM
    film_with_rare_key_frames(file, pictures(31, 1), gap=0.5)
    FILMS.forget()
    with pytest.raises(DatasetError, match="rows and pictures are not of the same time: a row is"):
        read_episodes(tmp_path / "demos", memory_mb=LAZY).steps["obs/front"].load()
    (data,) = (tmp_path / "demos" / "data").rglob("*.parquet")
    table = pq.read_table(data)
    clock = np.asarray(table["timestamp"]) + 0.5 * (np.arange(30) > 11)
    place = table.column_names.index("timestamp")
    pq.write_table(table.set_column(place, "timestamp", pa.array(clock.astype(np.float32))), data)
    whole = torch.stack(list(decode_film(file)))[:30]
    lazy = read_episodes(tmp_path / "demos", memory_mb=LAZY)
    assert torch.equal(lazy.steps["obs/front"].load(), whole)


def test_a_film_that_is_cut_short_is_named_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "demos", (30,))
    lazy = read_episodes(tmp_path / "demos", memory_mb=LAZY)
    file = tmp_path / FILM
    film_with_rare_key_frames(file, pictures(12, 1))
    FILMS.forget()
    assert lazy.steps["obs/front"][:12].load().shape == (12, H, W, 3)
    with pytest.raises(DatasetError, match=r"file-000.mp4 is damaged"):
        lazy.steps["obs/front"][20:22].load()
