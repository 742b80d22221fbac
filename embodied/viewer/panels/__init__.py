"""The parts of the page: main view, timeline, plots, controls."""
