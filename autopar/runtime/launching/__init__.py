"""Processes: how ranks are started, how a failure of one ends all, and how ranks know who lives.

Read `launch.py` (ranks on this machine, for demos and tests), `same_sources.py` (what ranks
compare first), `failures.py` (guards around collectives), then `rank_liveness.py` below them.
"""
