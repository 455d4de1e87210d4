"""What serving engines do with a checkpoint: one model of them, from which every report, card and verb speaks.

A verdict is "loads" only where a test of ours ran that kind of checkpoint in that engine, or where the engine's own
check function accepts it; what nobody tried is "not tried" (:mod:`surgery.engines.trials`).
"""
