"""The YAML files of every configuration group, as package data."""
