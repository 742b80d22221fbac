"""The viewer: a local web page that shows a policy acting, in 3D, with controls and plots."""

# First: it sets MuJoCo's rendering backend, which must happen before MuJoCo is imported.
from embodied import envs as envs
from embodied.viewer.launch import serve as serve
from embodied.viewer.run_folder import ViewerError as ViewerError
