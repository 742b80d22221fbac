"""Policy wrappers: best-of-N, EXPO edits, real-time chunking, safety reflex (BRESA)."""
