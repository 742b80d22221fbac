"""Drivers: one arm's wire each, in numpy, without anything that learns."""
