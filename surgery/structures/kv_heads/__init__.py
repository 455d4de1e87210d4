"""Merging of KV heads."""
