"""Pages, pictures and traces: what people look at.

`page.py` makes the page of a plan from the pictures of the other files. `trace.py` and
`trace_comparison.py` write and compare traces of steps.
"""
