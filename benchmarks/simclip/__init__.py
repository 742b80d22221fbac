"""Training of SimClip, the packaged image-text encoder, on scenes with facts and captions."""
