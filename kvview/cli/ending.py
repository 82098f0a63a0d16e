"""The end of the process after the command, which a thread of the target may prevent.

Python waits for every thread that is not a daemon. So a connector that leaves such a thread keeps
``kvview check`` from returning after its report, and a CI job runs until its time limit.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

from kvview.cli.echo import echo

_SECONDS = 10.0


def end_soon(code: int) -> None:
    """End the process with an exit code, even if threads are left; name these threads.

    A caller that continues after the command, such as a test, is not ended.
    """
    program = _outermost(sys._getframe()).f_code

    def end() -> None:
        frames = sys._current_frames()
        main = frames.get(threading.main_thread().ident or 0)
        if main is not None and _outermost(main).f_code is program:
            return
        kept = (thread for thread in threading.enumerate() if not thread.daemon)
        places = [
            f"{thread.name!r} at {frame.f_code.co_filename}:{frame.f_lineno}"
            for thread in kept
            if (frame := frames.get(thread.ident or 0)) is not None and frame is not main
        ]
        text = ", ".join(places) or "unknown"
        echo(
            f"kvview: threads of the target have not ended {_SECONDS:g} s after the report, so "
            f"the process ends without them, with the exit code {code}: {text}",
            err=True,
        )
        sys.stdout.flush()
        os._exit(code)

    timer = threading.Timer(_SECONDS, end)
    timer.daemon = True
    timer.start()


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame
