"""What is being looked at: the episode, who acts, disturbances, overlays; no page."""
