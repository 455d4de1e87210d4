"""Recovery training: the order of events around the training itself."""
