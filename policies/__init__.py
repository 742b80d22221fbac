"""Policies: Gaussian, categorical, with memory, steering, denoising MDPs; others are sub-packages."""
