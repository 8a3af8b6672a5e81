"""Programs as segments: a graph of one block and a count, recognised, split and written out."""
