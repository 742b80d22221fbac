"""Environment wrappers that add observations for rewards: images, captions, visit counts."""
