"""Smaller checkpoint sliced from a converted one: the first latents of every block."""
