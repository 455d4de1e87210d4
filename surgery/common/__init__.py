"""Shared utilities: errors, progress, settings files. No torch and no domain knowledge."""
