"""A model as it runs: one layer at a time from its checkpoint, or loaded, with its attention tapped."""
