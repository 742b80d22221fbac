"""Pictures on disk: H.264 films of whole episodes, single PNG images, random access to films.

Our films have a key frame every second picture and none that looks ahead, so that films of the same
camera can be joined without encoding them again. A decoder goes on from where it stands if the next
moment lies in the same group of pictures, and seeks otherwise: at most two pictures are decoded for
one. A film with rare key frames costs as many as lie in between.
"""

# pyright: basic
# (PyAV has no types)
from __future__ import annotations

import bisect
import io
import itertools
import os
import struct
import threading
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import needed
from embodied.core.files import MALFORMED, SIDE, FileError, require_file
from embodied.datasets.lerobot.schema import DAMAGE, DatasetError, damaged


def rate(fps: float) -> Fraction:
    """Frames per second as the fraction that a film's clock counts in."""
    return Fraction(fps).limit_denominator(1000)


def encode_film(frames: Tensor, fps: float, quality: int = 18) -> bytes:
    """An MP4 file (H.264, yuv420p) of `frames` [T, H, W, 3] uint8 with even H and W. `quality` is
    x264's constant rate factor: 0 is lossless, 18 hard to tell apart, 30 small."""
    av = _av()
    sink = io.BytesIO()
    with av.open(sink, "w", format="mp4") as film:
        options = {"crf": str(quality), "g": "2", "bf": "0", "preset": "veryfast"}
        stream = film.add_stream("libx264", rate=rate(fps), options=options)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        for picture in frames.cpu().contiguous().numpy():
            film.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        film.mux(stream.encode(None))
    return sink.getvalue()


def join_films(films: Sequence[bytes]) -> bytes:
    """One MP4 file of `films` (same camera and settings) one after the other, not re-encoded."""
    if len(films) == 1:
        return films[0]
    av = _av()
    sink = io.BytesIO()
    with av.open(sink, "w", format="mp4") as joined:
        stream: Any = None
        shift = 0
        for film in films:
            with av.open(io.BytesIO(film)) as part:
                source = part.streams.video[0]
                if stream is None:
                    stream = joined.add_stream_from_template(source)
                tick = Fraction(1) / (source.average_rate * source.time_base)
                count = 0
                for packet in part.demux(source):
                    if packet.dts is None:
                        continue
                    packet.pts += shift
                    packet.dts += shift
                    packet.stream = stream
                    joined.mux(packet)
                    count += 1
                shift += int(count * tick)
    return sink.getvalue()


def open_film(path: Path) -> Any:
    """The film as PyAV's container; close it. FileError for another kind of file, and for pictures
    that are too large."""
    require_file(path)
    film = _av().open(str(path))
    for stream in film.streams.video:
        if max(stream.width, stream.height) > SIDE:
            film.close()
            raise FileError(f"{path} has pictures of more than {SIDE:,} pixels a side")
    return film


def open_sink(sink: io.BytesIO) -> Any:
    """A new MP4 file, as PyAV's container; close it."""
    return _av().open(sink, "w", format="mp4")


def decode_film(path: Path) -> Iterator[Tensor]:
    """The pictures [H, W, 3] uint8 of a film, in order."""
    with open_film(path) as film:
        for frame in film.decode(video=0):
            yield torch.from_numpy(frame.to_ndarray(format="rgb24"))


def encode_png(picture: Tensor) -> bytes:
    """A PNG file of one picture [H, W, C] uint8 with C of 1, 3 or 4, or of distances [H, W, 1] in m
    (float32), which are kept in mm (16 bits, at most 65.535 m)."""
    array = picture.cpu().contiguous().numpy()
    if picture.is_floating_point():
        array = np.rint(1000 * array).clip(0, 65535).astype(np.uint16)
    return _imageio().imwrite("<bytes>", array[..., 0] if array.shape[-1] == 1 else array, **_PNG)


# What Pillow raises, beside what any reader does, for a file that is damaged.
NO_PICTURE = (OSError, SyntaxError, OverflowError, struct.error, zlib.error)


def decode_image(data: bytes) -> Tensor:
    """The picture [H, W, C] in a PNG, JPEG or TIFF file: uint8, or as int32 one of 16 bits."""
    array = decode_numbers(data)
    return torch.from_numpy(array.astype(np.int32) if array.dtype == np.uint16 else array)


def decode_numbers(data: bytes) -> np.ndarray:
    """The same in the file's own type (uint8, uint16, float32). FileError."""
    imageio = _imageio()
    _require_picture(data)
    try:
        array = np.array(imageio.imread(data))
    except (*NO_PICTURE, *MALFORMED) as error:
        raise FileError(f"it is no picture ({error})") from error
    return array[..., None] if array.ndim == 2 else array


def _require_picture(data: bytes) -> None:
    """FileError unless this is one PNG, JPEG or TIFF picture of a possible size: imageio
    would start other programs for other kinds."""
    pillow = _pillow()
    try:
        with pillow.open(io.BytesIO(data), formats=("PNG", "JPEG", "TIFF")) as picture:
            size = picture.size
            films = picture.format == "PNG" and picture.n_frames > 1
    except (pillow.DecompressionBombError, *NO_PICTURE, *MALFORMED) as error:
        raise FileError(f"it is no picture ({error})") from error
    if max(size) > SIDE or films:
        raise FileError(f"it should be one picture of at most {SIDE:,} pixels a side")


@cache
def _pillow() -> Any:
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # it is an error
    return Image


_PNG = {"extension": ".png", "compress_level": 3}


def _av() -> Any:
    return needed("av", "films need PyAV", "media")


def _imageio() -> Any:
    return needed("imageio.v3", "images need imageio", "media")


SAY_DEPTH = 'write "info": {"is_depth_map": true, "depth_unit": "mm"} into its feature'
OPEN = 32  # films that are held open at a time
PART = 16  # pictures of one film that are worth a decoder of their own


class FilmReader:
    """One open film. Not for two threads at a time."""

    def __init__(self, file: Path, fps: float) -> None:
        self.file, self.half = file, 0.5 / fps
        self.film = open_film(file)
        self.stream = self.film.streams.video[0]
        self.stream.codec_context.thread_count = 1  # more of them only decode ahead
        self.frames: Iterator[Any] = iter(())
        self.frame: Any = None  # the newest that was decoded
        entries = getattr(self.stream, "index_entries", None)
        self.keys = [e.timestamp for e in entries if e.is_keyframe] if entries else None

    def close(self) -> None:
        self.film.close()

    def picture(self, time: float, pixels: str = "rgb24") -> np.ndarray:
        """The picture [H, W, 3] uint8 that is shown `time` s after the film's beginning; with the
        `pixels` "gray" or "gray12le" [H, W, 1], of 8 or 12 bits. DatasetError where the film is
        damaged, or shows none within half a period of it."""
        try:
            if self.frame is None or not self._ahead(time):
                at = int((time + 0.5 * self.half) / self.stream.time_base)
                self.film.seek(at, stream=self.stream, backward=True)
                self.frames, self.frame = self.film.decode(self.stream), None
            while self.frame is None or self.frame.time < time - self.half:
                self.frame = next(self.frames, None)
                if self.frame is None:
                    raise ValueError(f"it has no picture at {time:.3f} s, it ends before")
            if self.frame.time > time + self.half:
                raise DatasetError(
                    f"{self.file}: rows and pictures are not of the same time: a row is of "
                    f"{time:.3f} s, the next picture of {self.frame.time:.3f} s (timestamp of the "
                    "rows, from_timestamp of the episode)"
                )
            if pixels != "gray12le" and self.frame.format.name.startswith("gray1"):
                raise DatasetError(
                    f"{self.file}: the film has the pixels {self.frame.format.name}, and "
                    f"meta/info.json does not say what they are: {SAY_DEPTH}"
                )
            shown = self.frame.to_ndarray(format=pixels)
            return shown if shown.ndim == 3 else shown[..., None]
        except DatasetError:
            raise
        except (*DAMAGE, RuntimeError) as error:
            self.frame = None
            raise damaged(self.file, error) from error

    def _ahead(self, time: float) -> bool:
        """Whether decoding on is at most as long a way to `time` as a seek."""
        if time < self.frame.time - self.half:
            return False
        if self.keys is None:
            return time <= self.frame.time + 5 * self.half
        return self._group(time) <= self._group(self.frame.time) + 1

    def _group(self, time: float) -> int:
        assert self.keys is not None
        return bisect.bisect_right(self.keys, (time + self.half) / self.stream.time_base)


class FilmPool:
    """Open films, for several threads: a film is used by one thread at a time, or opened twice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free: OrderedDict[int, FilmReader] = OrderedDict()

    def take(self, file: Path, fps: float) -> FilmReader:
        with self.lock:
            for key, reader in self.free.items():
                if reader.file == file:
                    return self.free.pop(key)
        try:
            return FilmReader(file, fps)
        except (*DAMAGE, RuntimeError, IndexError) as error:
            raise damaged(file, error) from error

    def give(self, reader: FilmReader) -> None:
        """Keep the film open for the next one who asks; the one unused for longest is closed."""
        with self.lock:
            self.free[id(reader)] = reader
            old = self.free.popitem(last=False)[1] if len(self.free) > OPEN else None
        if old is not None:
            old.close()

    def forget(self) -> None:
        with self.lock:
            readers, self.free = list(self.free.values()), OrderedDict()
        for reader in readers:
            reader.close()


FILMS = FilmPool()


def decode_jobs(
    file: Path, fps: float, times: np.ndarray, put: Callable[[int, np.ndarray], None], pixels: str
) -> list[Callable[[], None]]:
    """Work for several threads: `put(i, picture)` for every i of the ascending `times` [n] (s), its
    `pixels` as in `FilmReader.picture`."""
    parts = max(1, min(workers(), len(times) // PART))
    bounds = np.linspace(0, len(times), parts + 1).astype(int)

    def job(begin: int, end: int) -> None:
        reader = FILMS.take(file, fps)
        for i in range(begin, end):
            put(i, reader.picture(float(times[i]), pixels))
        FILMS.give(reader)

    return [lambda a=a, b=b: job(a, b) for a, b in itertools.pairwise(bounds)]


def run_jobs(jobs: Sequence[Callable[[], None]]) -> None:
    """Run `jobs` on all cores (decoding lets go of Python's lock); raises the first error."""
    if len(jobs) <= 1 or workers() == 1:
        for job in jobs:
            job()
        return
    for done in [_threads(os.getpid()).submit(job) for job in jobs]:
        done.result()


def workers() -> int:
    return min(8, len(os.sched_getaffinity(0)))


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process (those of a parent do not survive a fork)."""
    return ThreadPoolExecutor(workers(), thread_name_prefix="films")
