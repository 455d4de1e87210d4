"""Recipe files: steps, each a command with its settings."""
