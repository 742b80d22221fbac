"""A simulated Crazyflie: firmware and CRTP."""
