"""The program of one rank as a function: eager, recomputed, offloaded or compiled.

Read `eager_program.py` first, then `region_calls.py` and `recomputed_regions.py` with
`activation_offload.py`, and `compiled_regions.py` with `block_groups.py`.
"""
