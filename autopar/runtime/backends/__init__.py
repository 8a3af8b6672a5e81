"""Run programs: `VirtualBackend` has all ranks, `TorchBackend` one of torch.distributed.

Read `backend.py` first, then `virtual_backend.py` with `replica_checks.py`. Of the real mesh read
`world.py`, `process_groups.py` and `stage_ranks.py` before `distributed_backend.py`, which uses
`stage_messages.py` and `piece_collection.py`. The other files stand alone: `host_copies.py` for
states on the host, `program_checks.py` for `check=True`, `rank0_values.py` for split loaders.
"""
