"""What plays a robot where there is none: at the level of its wire, for its real driver."""
