"""Images of our environments with the facts that hold in them: training data of SimClip."""
