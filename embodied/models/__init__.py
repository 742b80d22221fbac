"""Learned models of environments: the role `Dynamics`, its methods, fitting them to datasets."""
