"""Heads that keep their whole context next to heads that keep sinks and recent tokens."""
