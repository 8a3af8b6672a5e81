"""Device, link and memory models: formulas that are read by people and computed by programs."""
