"""Generative policies: flow, diffusion, shortcut, consistency, minimal iterative, ACT, one-step."""
