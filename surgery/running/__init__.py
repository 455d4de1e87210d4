"""Execution of models: layer by layer from the checkpoint, or loaded whole, with hooks into attention."""
