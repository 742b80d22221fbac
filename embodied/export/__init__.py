"""Export: a trained policy as a file that runs where this project is not installed.

One decision as a function of named arrays: observations in their own units and noise in, a chunk of
actions in [-1, 1] out. Each format is one module, and each is checked against PyTorch as it is
written.
"""
