"""Ten tasks that a sentence tells apart, in one FR3 scene: `env=fr3_tasks`."""
