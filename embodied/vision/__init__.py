"""Image-text encoders: CLIP and SigLIP, and SimClip."""
