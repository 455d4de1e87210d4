"""Verification: a written checkpoint is run and compared with the simulated conversion."""
