"""Image-text encoders: CLIP and SigLIP, and SimClip with its training on simulated scenes."""
