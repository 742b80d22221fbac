"""What stands between any policy and any driver, the same in simulation and on metal."""
