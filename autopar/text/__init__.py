"""Texts for people: numbers with units, tables, drawings, progress and lines of their code.

Nothing here knows of models or plans. `units.py` first, then `tables.py`; `drawing.py` makes SVG;
`source_lines.py` finds the user's line that led to a call, for errors and warnings.
"""
