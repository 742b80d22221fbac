"""Cutting films without encoding them again: the packets of the episodes that are kept."""

# pyright: basic
# (PyAV has no types)
from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from embodied.datasets.lerobot.index import DAMAGE, damaged
from embodied.datasets.lerobot.video import open_film, open_sink

Span = tuple[float, float]


def cut_film(file: Path, spans: Sequence[Span], fps: float) -> bytes | None:
    """An MP4 file of the pictures in `spans` (begin and end in s, ascending), one span after the
    other. None where a span does not begin with a key frame, or is not all of its groups of
    pictures: such a film cannot be cut without encoding it again."""
    try:
        with open_film(file) as film:
            packets = _packets(film, spans, 0.5 / fps)
            return None if packets is None else _joined(film, packets, fps)
    except (*DAMAGE, RuntimeError) as error:
        raise damaged(file, error) from error


def _packets(film: Any, spans: Sequence[Span], half: float) -> list[list[Any]] | None:
    """The packets of each span, in the order of decoding."""
    stream = film.streams.video[0]
    found: list[list[Any]] = [[] for _ in spans]
    last = None  # the span of the packet before
    for packet in film.demux(stream):
        if packet.pts is None:
            continue
        time = float(packet.pts * stream.time_base)
        here = next((i for i, (a, b) in enumerate(spans) if a - half <= time < b - half), None)
        if here != last and here is not None and not packet.is_keyframe:
            return None
        if here is None and last is not None and not packet.is_keyframe:
            return None  # the last group of pictures reaches beyond the span
        if here is not None:
            found[here].append(packet)
        last = here
    return found


def _joined(film: Any, groups: Sequence[Sequence[Any]], fps: float) -> bytes:
    stream = film.streams.video[0]
    tick = round(Fraction(1) / (Fraction(fps).limit_denominator(1000) * stream.time_base))
    sink = io.BytesIO()
    with open_sink(sink) as made:
        # opaque: packets are copied, so no encoder of this codec is needed (AV1 often has none)
        target = made.add_stream_from_template(stream, opaque=True)
        at = 0
        for packets in groups:
            shift = at - min(packet.pts for packet in packets)
            for packet in packets:
                packet.pts += shift
                packet.dts += shift
                packet.stream = target
                made.mux(packet)
            at += tick * len(packets)
    return sink.getvalue()
