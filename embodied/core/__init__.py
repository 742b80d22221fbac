"""The contracts that everything else meets at; depends on torch only."""
