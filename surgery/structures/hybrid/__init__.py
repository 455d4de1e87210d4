"""Heads with full context next to streaming heads, which cache sinks and recent tokens only."""
