"""`embodied bench gpu`: its parts, each a function that measures on one device and returns rows."""
