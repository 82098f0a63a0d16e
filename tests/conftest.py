"""Settings of all tests."""

import os
import signal


def pytest_configure() -> None:
    """Give torch one thread in each process, and let tests interrupt commands.

    xdist runs a process on each core, and threads of torch that wait for each other cost ten times
    the CPU time of the copies. A shell starts background jobs with SIGINT ignored.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
