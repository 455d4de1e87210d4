"""Llama 1, 2, 3 and models of their class: optional biases, llama3 RoPE scaling, any head_dim."""

from surgery.families.base import Family

LLAMA = Family(model_type="llama")
