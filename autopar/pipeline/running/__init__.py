"""Execution of schedules: `executor.py` does a rank's actions, `worker.py` runs one stage, and
`weight_halves.py` defers the gradients of weights where backward is split.
"""
