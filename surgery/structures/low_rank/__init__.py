"""Low-rank latents in place of keys and values, per layer or as a cascade over a group of layers."""
