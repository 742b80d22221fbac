"""Off-policy learners with a replay buffer: SAC and its variants, TD3, DSAC-T, FlashSAC, BRESA."""
