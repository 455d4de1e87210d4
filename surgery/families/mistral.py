"""Mistral: Llama's shapes, and in version 0.1 one sliding window for all layers."""

from surgery.families.base import Family, uniform_window

MISTRAL = Family(model_type="mistral", window=uniform_window)
