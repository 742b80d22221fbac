"""Updates, one file a method: off_policy, on_policy, offline, imitation, finetune."""
