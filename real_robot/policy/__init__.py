"""The policy process: observations in, chunks of actions out."""
