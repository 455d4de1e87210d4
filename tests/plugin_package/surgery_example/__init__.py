"""Entry points by which model-surgery finds this package."""
