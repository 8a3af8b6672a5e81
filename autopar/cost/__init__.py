"""Models of devices, links and memory: formulas that people read and programs compute.

Read `formula`, `rooflines` and `operator_costs` (seconds of an operator), `cluster_price` (of a
movement), `state_price` (of keeping a parameter), then `time_report` and `footprint` (seconds and
bytes of a finished program). `copy_groups` and `bucket_prices` say what is gathered and summed
together; `saved_tensors`, what backward keeps.
"""
