"""Policies: Gaussian, categorical, with memory, steering, denoising MDPs; others as packages."""
