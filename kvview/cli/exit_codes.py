"""The exit codes of every command."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit code of a command.

    Attributes:
        meaning: Text of the exit code in the help and on the page of commands.
    """

    CLEAN = 0, "clean"
    WRONG = 1, "the run found something wrong: a mismatch, a leak, a broken law"
    COULD_NOT_RUN = 2, "the command could not run"
    CONNECTOR_RAISED = 3, "the connector raised, or one of its hooks returned a wrong value"
    NOT_CHECKED = 4, "nothing is wrong, but a required check is missing"
    BUG = 5, "a bug of kvview or of a command"
    INTERRUPTED = 130, "interrupted, and nothing was wrong until then"

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        """Make a member from a number and its meaning."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {code.meaning}" for code in ExitCode)
"""Last lines of the help of every command."""
