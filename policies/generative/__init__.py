"""Generative policies: flow, diffusion, shortcut, consistency, ACT, one-step."""
