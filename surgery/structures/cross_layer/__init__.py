"""Layers that share one cache of old tokens."""
