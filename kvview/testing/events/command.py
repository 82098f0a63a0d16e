"""``kvview events``: receive, record and validate streams of KV events."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING

import click

from kvview.cli.echo import echo
from kvview.cli.exit_codes import EXIT_CODES, ExitCode
from kvview.cli.output import OutputFile, Seconds, Whole
from kvview.errors import ConfigError, WireFormatError

if TYPE_CHECKING:
    from kvview.events.channel import Listener
    from kvview.events.recording import Message
    from kvview.testing.events.stream_fold import StreamFold

_SHOWN = 20  # maximum of findings, and of problems of the connection, that are printed


@click.command(epilog=EXIT_CODES)
@click.argument("source")
@click.option("--messages", type=Whole(1), help="Stop after this number of messages.")
@click.option("--seconds", type=Seconds(), help="Stop after this number of seconds.")
@click.option(
    "--record",
    "recording_file",
    type=OutputFile(may_be_stdout=False),
    metavar="FILE",
    help="Also write the messages into FILE (.jsonl, or .jsonl.gz).",
)
def events(
    source: str,
    messages: int | None,
    seconds: float | None,
    recording_file: str | None,
) -> None:
    """Validate KV events of vLLM against their format and the laws EVENT-1, -2, -3 and -5.

    SOURCE is an endpoint, tcp://HOST:PORT or ipc://PATH, or a recording (.jsonl, .gz).
    """
    from kvview.events.channel import Listener
    from kvview.events.recording import Recording, read_recording
    from kvview.testing.events.stream_fold import StreamFold

    fold, num_findings, num_problems, has_ended = StreamFold(), 0, 0, False

    def report(problem: str) -> None:
        nonlocal num_problems
        num_problems += 1
        if num_problems <= _SHOWN:
            echo(f"kvview: {problem}", err=True)

    with ExitStack() as opened:
        if "://" in source:
            listener = opened.enter_context(Listener(source))
            stream = _live(listener, seconds, report)
        elif (seconds, recording_file) != (None, None):
            raise ConfigError("--seconds and --record need an endpoint as SOURCE")
        else:
            stream = read_recording(source)
        if recording_file is not None:
            recording = opened.enter_context(Recording(recording_file))
            stream = _recorded(stream, recording.write)
        with suppress(KeyboardInterrupt):
            for message in islice(stream, messages):
                for finding in fold.apply(message.sequence, message.payload):
                    num_findings += 1
                    if num_findings <= _SHOWN:
                        echo(f"message {finding.sequence}: {finding.law}: {finding.what}")
            has_ended = True
    _show(fold, num_findings)
    if num_findings:
        sys.exit(ExitCode.WRONG)
    if not has_ended:
        sys.exit(ExitCode.INTERRUPTED)
    sys.exit(ExitCode.NOT_CHECKED if num_problems or not fold.num_messages else ExitCode.CLEAN)


def _live(
    listener: Listener, seconds: float | None, report: Callable[[str], None]
) -> Iterator[Message]:
    """Yield the messages that arrive, and report each wrong one."""
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        left = 0.2 if end is None else max(0.0, min(0.2, end - time.monotonic()))
        try:
            message = listener.receive(left)
        except WireFormatError as error:
            report(str(error))
            continue
        if message is not None:
            yield message


def _recorded(stream: Iterator[Message], write: Callable[[Message], object]) -> Iterator[Message]:
    for message in stream:
        write(message)
        yield message


def _show(fold: StreamFold, num_findings: int) -> None:
    """Print the numbers of messages, events, findings and blocks."""
    if num_findings > _SHOWN:
        echo(f"... and {num_findings - _SHOWN} more findings")
    formats = ", ".join(fold.formats) or "no format"
    echo(f"{fold.num_messages} messages, {fold.num_events} events, {formats}")
    for medium, held in sorted(fold.held.items()):
        echo(f"{medium}: {len(held)} blocks")
    if fold.num_messages and not fold.knows_all:
        echo("some messages were missed, so the list of blocks is incomplete")
