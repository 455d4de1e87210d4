"""Recipe files: steps, each a verb with its settings."""
