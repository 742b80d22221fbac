"""Tests of the sandbox: legitimate programs run, hostile ones do no harm."""
