"""Success classifiers: labels, network, calibration, interventions."""

from embodied.moved import attributes

__getattr__ = attributes(__name__)
