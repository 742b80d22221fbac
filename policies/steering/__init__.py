"""Policies around a frozen base: DSRL (latent noise), residual."""
