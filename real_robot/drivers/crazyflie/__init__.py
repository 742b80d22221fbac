"""The Crazyflie quadrotor over its radio."""
