"""Teachers that choose task vectors: ALP-GMM, ADR, GoalGAN and others."""
