"""``python -m kvview``: the command line."""

from kvview.cli import main

main()
