"""Learners, a class per method, by kind: imitation, offline, off_policy, on_policy, finetune."""
