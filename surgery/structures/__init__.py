"""What attention can become: a folder for each target, and the one order of events of a conversion."""
