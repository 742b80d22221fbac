"""The 3D scene: bodies and shapes of MuJoCo and SAPIEN as viser nodes."""
