"""Generative policies whose denoising steps are the actions of an MDP (DPPO, ReinFlow)."""
