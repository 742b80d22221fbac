"""Robotiq 2F grippers, over Modbus RTU or the socket of a UR controller, beside any arm."""
