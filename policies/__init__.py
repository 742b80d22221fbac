"""Policies: Gaussian, categorical, with memory, steering, denoising MDPs; others in sub-packages."""
