"""Policies on other machines: a policy that asks a policy server, and its connection."""
