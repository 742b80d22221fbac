"""A policy acting, in the browser: one local page with the scene in 3D, controls and plots."""

# First, as it says how MuJoCo draws, which counts only before MuJoCo itself is imported.
import envs as envs
from embodied.viewer.launch import serve as serve
from embodied.viewer.run_folder import ViewerError as ViewerError
