"""Serving engines and the checkpoints that they load: one model of them for every report, card and command.

A verdict is "loads" only where a test of ours ran that kind of checkpoint in that engine, or where the engine's own
check function accepts it; what nobody tried is "not tried" (:mod:`surgery.engines.trials`).
"""
