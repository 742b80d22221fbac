"""The panels of the page: main view, timeline, plots, task, disturbances, observations."""
