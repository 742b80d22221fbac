"""Policies that steer a frozen base policy: DSRL (latent noise) and residual actions."""
