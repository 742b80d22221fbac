"""The web server on this machine, its authentication proxy and its threads."""
