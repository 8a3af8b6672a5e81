"""Observation: what a parallel module reports of its steps while it trains.

Read `step_observation.py` (the methods), then `step_figures.py` (loss, rates), `recording.py`
(times of actions), `memory_in_use.py`, `expert_balance.py` and `timing.py` (several modules).
"""
