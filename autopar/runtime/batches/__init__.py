"""Batches: what ranks are given of a batch, by data loaders, slices and checks of what they hold.

Read `data_loader.py` first: a rank gives its part of a batch, or the whole, of which
`batch_slices.py` takes its part.
"""
