"""Programs as segments: a graph of one block and a count, recognised, split and written out.

The parts between rows of equal blocks are segments with a count of 1.
"""
