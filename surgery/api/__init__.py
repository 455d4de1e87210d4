"""Python functions of the commands, their model arguments and results."""
