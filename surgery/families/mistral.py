"""Mistral: Llama's shapes; version 0.1 has a sliding window in all layers."""

from surgery.families.base import Family, uniform_window

MISTRAL = Family(model_type="mistral", window=uniform_window)
