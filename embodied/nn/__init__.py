"""Networks and numerics shared by several methods: MLPs, ensembles, normalizers, optimizers."""
