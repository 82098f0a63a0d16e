"""``python -m tests.traces FOLDER``: the look-alikes, for ``kvview replay`` and ``kvview size``."""

import sys
from pathlib import Path

from tests.traces import NAMES, write_look_alike

if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
    sys.exit("usage: python -m tests.traces FOLDER   (an existing folder)")
for name in NAMES:
    write_look_alike(Path(sys.argv[1]) / name)
    print(Path(sys.argv[1]) / name)
