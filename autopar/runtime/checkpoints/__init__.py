"""Save a parallel module and its optimizer, and load them under any other plan.

Read `saving.py` first: `save` and `load`. Then `checkpoint_writing.py`, which divides the pieces
among ranks and writes them, `checkpoint_files.py` with the format, `checkpoint_folders.py`, which
replaces one checkpoint by another, and `plain_data.py` with the data that `extra` may hold.
"""
