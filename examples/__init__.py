"""Examples: one method per file, written out in full, to read, copy and change."""
