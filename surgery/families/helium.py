"""Helium: Llama's attention with neighboring rotary pairs."""

from surgery.families.base import Family

HELIUM = Family(model_type="helium", interleaved=True)
