"""What model-surgery finds by entry points."""
