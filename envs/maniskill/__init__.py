"""ManiSkill 3 tasks, on the CPU or as one batch on a GPU."""
