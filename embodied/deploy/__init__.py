"""Deploying a policy on a robot: checks, the session with its daemon, parity with simulation."""
