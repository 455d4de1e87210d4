"""A smaller checkpoint from a converted one: the first latents of every block."""
