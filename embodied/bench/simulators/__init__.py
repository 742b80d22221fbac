"""Speed of environments against their original packages and wrappers."""
