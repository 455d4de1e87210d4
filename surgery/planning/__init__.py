"""Planning: choice of a conversion for a budget, by simulating candidates side by side on held-out text."""
