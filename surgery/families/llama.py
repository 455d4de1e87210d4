"""Llama 1, 2, 3 and what follows their class: optional biases everywhere, llama3 RoPE scaling, free head_dim."""

from surgery.families.base import Family

LLAMA = Family(model_type="llama")
