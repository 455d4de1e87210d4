"""Inspection of a checkpoint and its possible conversions, and verification of a converted one."""
