"""Contract checks of environments, policies, learners, rewards, teachers and robots.

`embodied check` and tests/contract run the same functions.
"""
