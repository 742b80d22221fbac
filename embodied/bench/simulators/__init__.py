"""Speed of environments against their own packages."""
