"""Kernels of attention: `causal.py` has cut queries on each rank alone, `ring.py` rings of ranks.

Read `attention_blocks.py` before `ring.py`. `dropped_attention.py` is attention with dropout of its
weights on one rank.
"""
