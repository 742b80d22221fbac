"""Teachers that choose the simulator state in which an episode begins."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
