"""The control process, and what sends set-points to its kernel: chunks of a policy, homing."""
