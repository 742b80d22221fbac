"""Stages of the safety chain beside the kernel's: workspace, geometry, reflex, energy tank."""
