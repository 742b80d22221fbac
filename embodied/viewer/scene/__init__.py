"""The 3D scene: bodies and shapes of MuJoCo and SAPIEN, drawn as viser nodes."""
