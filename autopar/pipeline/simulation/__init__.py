"""Simulation of schedules: from the costs of actions and messages to the time of a step.

Read `action_times.py`, `timeline.py`, `synchronization.py` and `simulator.py`, then
`step_price.py`, which simulates a planned program. `gantt.py` draws a step, and
`compute_lower_bound.py` bounds its time.
"""
