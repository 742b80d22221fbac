"""Developers' tools, not in the wheel: measurements of speed, studies, the training of SimClip.

`python -m benchmarks.NAME out=DIR` measures, beside other projects where there are any;
`python -m benchmarks.evidence STUDY` runs a study of `benchmarks/studies`, and
`python -m benchmarks.simclip out=DIR` trains the encoder. This package imports any part of the
product; the product never imports it. It has many modules because most of them are commands.
"""
