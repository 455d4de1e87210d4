"""Inspection of a checkpoint and of its possible conversions, before any of them."""
