"""A user's own package as docs/extending.md described it at commit 8490570; never edited since."""
