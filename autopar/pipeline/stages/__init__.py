"""Stages: how a program is cut for a pipeline, and the cost of each stage.

`stage_tables.py` has the cost of any stage, with `spans.py` and `kept_activations.py`; `cut.py`
chooses the cut points, with `shared_memory.py` where stages share a rank.
"""
