"""`python -m autopar`: the command `autopar`."""

from __future__ import annotations

from autopar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
