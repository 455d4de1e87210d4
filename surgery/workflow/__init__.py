"""Recipes: files of steps, each a command with its settings."""
