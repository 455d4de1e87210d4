"""Groups of layers that share one cache of old tokens."""
