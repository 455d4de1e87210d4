"""The commands as functions of the package: what they take for a model, and what they return."""
