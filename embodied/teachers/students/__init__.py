"""Student archives (Meta-ACL) and a simulated student to compare teachers with."""
