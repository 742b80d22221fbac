"""Policies that steer a frozen base policy: DSRL (latent noise), searched noise, residuals."""
