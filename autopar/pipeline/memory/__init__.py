"""Memory of pipelines: the bytes that each rank holds during a step.

`activation_counts.py` counts live micro-batches by order alone. `memory_timeline.py` follows one
program call by call, with `call_memory.py`, `gradient_bytes.py` and `copy_lifetimes.py`;
`moments.py` repeats it for equal blocks. `step_memory.py` adds up the stages of a rank.
"""
