"""Policies that ask a language model what to do."""
