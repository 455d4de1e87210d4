"""Latents in place of keys and values; also across layers, as a cascade."""
