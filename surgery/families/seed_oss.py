"""Seed-OSS: biases on queries, keys and values, and heads whose width is apart from the hidden size."""

from surgery.families.base import Family

SEED_OSS = Family(model_type="seed_oss")
