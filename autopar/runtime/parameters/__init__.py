"""The parameters of a running model: initial values, storage, gathered copies, gradients, states.

Read `parameter_movement.py` first, then `local_parameters.py`, `gathered_copies.py` and
`gradient_buckets.py` with `piece_exchange.py` and `flat_buffers.py`. `initial_values.py` fills the
parameters, `placing.py` cuts them, and `tensor_tree.py` sees what users change between steps.
"""
