"""What a checkpoint is and what it can become, before any conversion."""
