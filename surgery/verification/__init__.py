"""Verification: what was written is run and compared with what was simulated."""
