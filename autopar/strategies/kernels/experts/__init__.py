"""Kernels of mixtures of experts.

Read `expert_kernels.py` (the layer), then `routed_experts.py` (tokens that travel). `capacity.py`
limits the tokens of an expert, `chosen_products.py` is a product by chosen matrices.
"""
