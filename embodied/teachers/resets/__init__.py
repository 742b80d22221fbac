"""Teachers that choose the simulator state in which an episode begins."""
