"""``python -m kvview.cli``: the same as ``kvview``."""

from kvview.cli import main

main()
