"""Train robot policies, improve them by reinforcement learning, and put them on robots."""

from embodied import moved

moved.install()
