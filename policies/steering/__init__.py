"""Policies around a frozen base policy: DSRL (latent noise) and residual corrections."""
