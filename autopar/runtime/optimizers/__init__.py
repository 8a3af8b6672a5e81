"""Optimizers of parallel modules that work on the local tensors of each rank.

Read `optimizer.py` first, then `local_optimizer.py`. `updated_group.py` has the tensors that stand
for parameters, and `states_view.py` shows their states. `update_scope.py` finds out what the update
of an element depends on, and `owner_exchange.py` brings whole tensors to those that need them.
"""
