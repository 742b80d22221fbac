"""Policy wrappers: best-of-N, EXPO edits, real-time chunking, physical units, reflex (BRESA)."""
