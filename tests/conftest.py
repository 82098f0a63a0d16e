"""Settings of all tests."""

import signal


def pytest_configure() -> None:
    """Let tests interrupt commands: a shell starts background jobs with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
