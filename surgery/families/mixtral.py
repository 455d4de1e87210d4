"""Mixtral: Mistral's attention over experts that pass through."""

from surgery.families.base import Family, uniform_window

MIXTRAL = Family(model_type="mixtral", window=uniform_window, experts=True)
