"""LeRobot's Diffusion and ACT policies as modules of ours, with its tensor names."""
