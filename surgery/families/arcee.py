"""Arcee (AFM): Llama's attention; feed-forward layers without gates."""

from surgery.families.base import Family

ARCEE = Family(model_type="arcee", extra_parts="feed-forward layers without gates")
