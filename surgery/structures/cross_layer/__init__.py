"""Cascades: layers that also read the latents of earlier layers in their group."""
