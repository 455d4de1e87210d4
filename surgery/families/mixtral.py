"""Mixtral: Mistral's attention; experts stay unchanged."""

from surgery.families.base import Family, uniform_window

MIXTRAL = Family(model_type="mixtral", window=uniform_window, experts=True)
