"""ERNIE 4.5, dense: Llama's attention with neighboring rotary pairs; optional biases."""

from surgery.families.base import Family

ERNIE4_5 = Family(model_type="ernie4_5", interleaved=True)
