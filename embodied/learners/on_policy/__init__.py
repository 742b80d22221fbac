"""On-policy learners: PPO and its variants."""
