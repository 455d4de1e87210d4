"""Chooses a conversion for a budget: what could be done is simulated on held-out text, side by side."""
