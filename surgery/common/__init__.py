"""What every folder may use: errors, progress, settings files. No torch, nothing of the domain."""
