"""Quantized KV cache."""
