"""Policies: Gaussian, categorical, recurrent, deterministic; other kinds are in sub-packages."""
