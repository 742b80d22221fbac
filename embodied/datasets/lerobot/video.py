"""Pictures on disk: H.264 films of whole episodes, and single PNG images.

Films have a key frame every second frame and no frames that look ahead, so that any moment can be
read quickly and films of the same camera can be joined without encoding them again.
"""

# pyright: basic
# (pyarrow and PyAV have no types)
from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.build import ConfigError


def rate(fps: float) -> Fraction:
    """Frames per second as the fraction that a film's clock counts in."""
    return Fraction(fps).limit_denominator(1000)


def encode_film(frames: Tensor, fps: float, quality: int = 18) -> bytes:
    """An MP4 file (H.264, yuv420p) of `frames` [T, H, W, 3] uint8 with even H and W.

    `quality` is x264's constant rate factor: 0 is lossless, 18 hard to tell apart, 30 small.
    """
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
    """The film as PyAV's container; close it."""
    return _av().open(str(path))


def open_sink(sink: io.BytesIO) -> Any:
    """A new MP4 file, as PyAV's container; close it."""
    return _av().open(sink, "w", format="mp4")


def decode_film(path: Path) -> Iterator[Tensor]:
    """The pictures [H, W, 3] uint8 of a film, in order."""
    with open_film(path) as film:
        for frame in film.decode(video=0):
            yield torch.from_numpy(frame.to_ndarray(format="rgb24"))


def encode_png(picture: Tensor) -> bytes:
    """A PNG file of one picture [H, W, C] uint8 with C of 1, 3 or 4."""
    array = picture.cpu().contiguous().numpy()
    return _imageio().imwrite("<bytes>", array[..., 0] if array.shape[-1] == 1 else array, **_PNG)


def decode_image(data: bytes) -> Tensor:
    """The picture [H, W, C] uint8 in a PNG or JPEG file."""
    array = np.array(_imageio().imread(data), dtype=np.uint8)
    return torch.from_numpy(array[..., None] if array.ndim == 2 else array)


_PNG = {"extension": ".png", "compress_level": 3}


def _av() -> Any:
    try:
        import av
    except ModuleNotFoundError as error:
        raise ConfigError('films need PyAV: pip install "embodied-rl[media]"') from error
    return av


def _imageio() -> Any:
    try:
        import imageio.v3
    except ModuleNotFoundError as error:
        raise ConfigError('images need imageio: pip install "embodied-rl[media]"') from error
    return imageio.v3
