"""Llama 1, 2, 3 and models of their class (optional biases, llama3 RoPE scaling, any head_dim), and near relatives.

Seed-OSS has biases; Arcee (AFM) has feed-forward layers without gates; ERNIE 4.5 (dense) and Helium have neighboring
rotary pairs.
"""

from surgery.families.base import Family

LLAMA = Family(model_type="llama")
SEED_OSS = Family(model_type="seed_oss")
ARCEE = Family(model_type="arcee", extra_parts="feed-forward layers without gates")
ERNIE4_5 = Family(model_type="ernie4_5", interleaved=True)
HELIUM = Family(model_type="helium", interleaved=True)
