"""From a configuration to a trained policy, for any method; more than fifteen modules because every
regime and every stage of the data pipeline has its own."""
