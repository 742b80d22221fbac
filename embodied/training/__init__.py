"""From a configuration to a trained policy: the training loops; no method is named here."""
