"""The exact minimum of a graph whose nodes choose strategies and whose edges price pairs of them.

Read `cost_graph` (the problem), `solve` (the road), then `dominated`, `fold` and `chain`,
`elimination`, `optimum`; under a memory limit `lagrangian` and `branch_and_bound`. Where
elimination leaves a core: `reduced_core`, `message_passing`, `forests`, `cp_sat_residual`.
"""
