"""Benchmarks of conversions, kernels and decoding."""
