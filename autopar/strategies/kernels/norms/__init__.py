"""Kernels of norms: over the batch in two steps, over groups of pieces, and by the mean square."""
