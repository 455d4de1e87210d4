"""Heads that keep their whole context beside heads that keep sinks and recent tokens."""
