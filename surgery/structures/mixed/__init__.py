"""Layers that become different things, each as one of the other structures makes it."""
