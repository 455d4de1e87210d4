"""Compatibility of checkpoints with serving engines, shared by all reports, cards and commands.

A verdict is "loads" only if one of our tests ran this kind of checkpoint in the engine, or if the engine's own check
function accepts it; otherwise it is "not tried" (:mod:`surgery.engines.trials`).
"""
