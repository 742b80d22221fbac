"""Learners from demonstrations and corrections: behaviour cloning, HG-DAgger, RECAP."""
