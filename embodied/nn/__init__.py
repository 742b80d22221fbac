"""Networks and numerics that several methods share: layers, ensembles, normalizers, optimizers."""
