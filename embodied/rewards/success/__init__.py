"""Success classifiers: labels, network, calibration, interventions."""
