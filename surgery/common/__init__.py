"""Utilities for every folder: errors, progress, settings files. No torch, nothing of the domain."""
