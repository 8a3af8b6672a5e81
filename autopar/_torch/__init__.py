"""Everything private of torch that autopar reads or calls (torch 2.11 to 2.13), by subject.

`tensors.py` and `operators.py` come first: most rooms use them. `autograd.py` and
`leaf_gradients.py` are about backward passes, `modules.py` about hooks and state dicts,
`communication.py` and `process_groups.py` about ranks, `export_graph.py` and `fake_shapes.py`
about export, `compiler.py` and `allocator_profile.py` about the tools of these names. A new
version of torch is checked here first.
"""
