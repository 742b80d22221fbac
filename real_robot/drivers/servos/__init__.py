"""Arms of Dynamixel or Feetech servos on one bus."""
