"""The Franka FR3 and its hand."""
