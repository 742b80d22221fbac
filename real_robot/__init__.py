"""Running a policy on a robot without ROS: control process, policy process, daemon, safety."""
