"""Search: a layout for every tensor of a captured graph.

Read `constraints` (what annotations ask), `propagation` (annotations spread), then the search for
the fastest layouts: `layout_search` over meshes (`mesh_choice`), `cost_graph_builder` for one mesh
with `candidates`, `edge_costs` and `reshard_table`, `solution_reader` back to `decisions`.
"""
