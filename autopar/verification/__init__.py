"""Verification: the plain model, its captured program and the parallel program, side by side.

Read `verification` (the result), `references` (training and comparing programs), `tolerance` and
`rounding` (which differences are allowed), then `captured_draws` (equal random numbers).
"""
