"""Simulated robots behind the real protocol: Franka (libfranka), Crazyflie (CRTP)."""
