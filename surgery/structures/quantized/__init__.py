"""A KV cache of a few bits."""
