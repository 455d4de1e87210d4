"""Ministral 8B: Mistral with windows in some layers."""

from surgery.families.base import Family, layer_types_window

MINISTRAL = Family(model_type="ministral", window=layer_types_window)
