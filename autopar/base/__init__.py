"""Helpers on Python and the disk for every room: safe files, checked data, whose code runs.

`files.py` replaces files as a whole, `schema.py` reads their data into declared types,
`user_code.py` tells a user's code from a library's, and `garbage_collection.py` postpones it.
"""
