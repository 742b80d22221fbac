"""MiniGrid and BabyAI on the Gymnasium or EnvPool backend, with levels and subgoals."""
