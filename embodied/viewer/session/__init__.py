"""The displayed episode without the page: stepping, policies, disturbances, value and reward
overlays."""
