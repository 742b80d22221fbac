"""Learners, one file per method, by kind: off_policy, on_policy, offline, imitation, finetune."""
