"""Environment wrappers that add what rewards look at: images, captions, visit counts."""
