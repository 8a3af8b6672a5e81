"""Rules of operators, one file for each family. Importing a file registers its rules.

Start with `elementwise.py` and `contractions.py`; `docs/howto/extend.md` adds an operator.
"""
