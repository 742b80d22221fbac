"""A policy acting, in the browser: one local page with the scene in 3D, controls and plots."""

from embodied.viewer.launch import ViewerError as ViewerError
from embodied.viewer.launch import serve as serve
