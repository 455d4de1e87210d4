"""What was written is run and held to what was simulated."""
