"""Arcee: Llama's attention under another feed-forward network."""

from surgery.families import Family

ARCEE = Family(model_type="arcee", extra_parts="feed-forward layers without gates")
