"""``kvview events``: receive, record and validate streams of KV events."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

import click

from kvview.cli.echo import echo
from kvview.cli.exit_codes import EXIT_CODES, ExitCode
from kvview.cli.output import OutputFile, Seconds, Whole, json_option, write_json
from kvview.errors import ConfigError

if TYPE_CHECKING:
    from kvview.events.channel import Listener
    from kvview.events.recording import Message
    from kvview.testing.events.stream_report import StreamReport

_SHOWN = 20  # maximum of findings that are printed; the JSON has more
_KEPT = 10_000


@click.command(epilog=EXIT_CODES)
@click.argument("source")
@click.option("--messages", type=Whole(1), help="Stop after this number of messages.")
@click.option("--seconds", type=Seconds(), help="Stop after this number of seconds.")
@click.option(
    "--replay-from", metavar="ENDPOINT", help="Endpoint from which to request missed messages."
)
@click.option(
    "--record",
    "recording_file",
    type=OutputFile(may_be_stdout=False),
    metavar="FILE",
    help="Also write the messages into FILE (.jsonl, or .jsonl.gz).",
)
@json_option({"events": "kvview.testing.events.stream_report:StreamReport"})
def events(
    source: str,
    messages: int | None,
    seconds: float | None,
    replay_from: str | None,
    recording_file: str | None,
    json_file: str | None,
) -> None:
    """Validate KV events of vLLM against their format and the laws EVENT-1, -2, -3 and -5.

    SOURCE is an endpoint, tcp://HOST:PORT or ipc://PATH, or a recording (.jsonl, .gz).
    """
    from kvview.events.channel import Listener
    from kvview.events.recording import Recording, read_recording
    from kvview.testing.events.stream_fold import Finding, StreamFold
    from kvview.testing.events.stream_report import StreamReport

    fold, findings, trouble = StreamFold(), list[Finding](), list[str]()
    num_findings, listener, is_interrupted = 0, None, False

    def report_trouble(problem: str) -> None:
        if len(trouble) < _SHOWN:
            echo(f"kvview: {problem}", err=True)
            trouble.append(problem)

    with ExitStack() as opened:
        if "://" in source:
            listener = opened.enter_context(Listener(source, replay_from))
            stream = _live(listener, seconds, report_trouble)
        elif (replay_from, seconds, recording_file) != (None, None, None):
            raise ConfigError("--replay-from, --seconds and --record need an endpoint as SOURCE")
        else:
            stream = read_recording(source)
        if recording_file is not None:
            recording = opened.enter_context(Recording(recording_file))
            stream = _recorded(stream, recording.write)
        try:
            for message in islice(stream, messages):
                found = fold.apply(message.sequence, message.payload)
                num_findings += len(found)
                findings += found[: _KEPT - len(findings)]
        except KeyboardInterrupt:
            is_interrupted = True
    if num_findings:
        code = ExitCode.WRONG
    elif is_interrupted:
        code = ExitCode.INTERRUPTED
    else:
        code = ExitCode.CLEAN if fold.num_messages and not trouble else ExitCode.NOT_CHECKED
    report = StreamReport(
        source=source,
        exit_code=int(code),
        messages=fold.num_messages,
        replayed=0 if listener is None else listener.num_replayed,
        events=dict(fold.num_events),
        formats=dict(fold.formats),
        held={medium: len(held) for medium, held in sorted(fold.held.items())},
        knows_all=fold.knows_all,
        missing=[(gap.start, gap.stop) for gap in fold.gaps],
        num_findings=num_findings,
        findings=findings,
        trouble=trouble,
    )
    _show(report, is_quiet=json_file == "-")
    write_json(json_file, asdict(report))
    sys.exit(code)


def _live(
    listener: Listener, seconds: float | None, report_trouble: Callable[[str], None]
) -> Iterator[Message]:
    """Yield messages in order, with missed messages in their places."""
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        left = 0.2 if end is None else max(0.0, min(0.2, end - time.monotonic()))
        yield from listener.follow(left, report_trouble)


def _recorded(stream: Iterator[Message], write: Callable[[Message], object]) -> Iterator[Message]:
    for message in stream:
        write(message)
        yield message


def _show(report: StreamReport, is_quiet: bool) -> None:
    """Print the report, to stderr if stdout has the JSON."""
    for finding in report.findings[:_SHOWN]:
        echo(f"message {finding.sequence}: {finding.law}: {finding.what}", err=is_quiet)
    if report.num_findings > _SHOWN:
        echo(f"... and {report.num_findings - _SHOWN} more findings", err=is_quiet)
    replayed = f", {report.replayed} of them replayed" if report.replayed else ""
    formats = ", ".join(report.formats) or "no format"
    num_events = sum(report.events.values())
    text = f"{report.messages} messages{replayed}, {num_events} events, {formats}"
    echo(text, err=is_quiet)
    for medium, number in report.held.items():
        echo(f"{medium}: {number} blocks", err=is_quiet)
    if report.messages and not report.knows_all:
        echo("some messages were missed, so the list of blocks is incomplete", err=is_quiet)
