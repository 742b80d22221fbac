"""The safety chain between any policy and any driver, the same in simulation and on a robot."""
