"""Seed-OSS: biases on queries, keys and values, head_dim independent of the hidden size."""

from surgery.families.base import Family

SEED_OSS = Family(model_type="seed_oss")
