"""Studies (variants over seeds, with intervals) and sweeps (settings, by Optuna), as HTML pages."""
