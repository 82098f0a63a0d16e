"""``kvview events``: receive, record and validate streams of KV events."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from kvview.cli.echo import echo
from kvview.cli.exit_codes import EXIT_CODES, ExitCode
from kvview.cli.output import OutputFile, Seconds, Whole, json_option, write_json
from kvview.errors import ConfigError

if TYPE_CHECKING:
    from kvview.events.channel import Listener
    from kvview.events.recording import Message
    from kvview.events.wire import Batch, WireEvent
    from kvview.testing.events.stream_fold import Finding, StreamFold

_SHOWN = 20  # maximum of findings that are printed; the JSON has more
_KEPT = 10_000
_SILENCE_S = 5.0  # seconds without a message after which a hint is printed
_JSON = json_option({"events": "kvview.testing.events.stream_report:StreamReport"})
_SOURCE = "SOURCE is an endpoint, tcp://HOST:PORT or ipc://PATH, or a recording (.jsonl, .gz)."


@click.group()
def events() -> None:
    """Receive, record and validate the KV events of vLLM."""


def _source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every command that reads a SOURCE."""
    for option in (
        click.option("--messages", type=Whole(1), help="Stop after this number of messages."),
        click.option("--seconds", type=Seconds(), help="Stop after this number of seconds."),
        click.option("--topic", default="", help="Prefix of the topics to read.  [default: any]"),
        click.option(
            "--replay-from",
            metavar="ENDPOINT",
            help="Endpoint from which to request missed messages.",
        ),
    ):
        command = option(command)
    return command


@events.command(epilog=EXIT_CODES)
@click.argument("source")
@_source_options
@click.option(
    "--format", "format_name", metavar="NAME", help="Decode only this format; report deviations."
)
@_JSON
def validate(
    source: str,
    format_name: str | None,
    json_file: str | None,
    **options: Any,
) -> None:
    """Validate a stream against its format and the laws EVENT-1, EVENT-2, EVENT-3 and EVENT-5.

    SOURCE is an endpoint, tcp://HOST:PORT or ipc://PATH, or a recording.
    """
    from kvview.events.formats import find_format
    from kvview.events.wire import EventDecoder
    from kvview.testing.events.stream_fold import StreamFold

    decoder = EventDecoder(None if format_name is None else find_format(format_name))
    report = _Report(StreamFold(decoder))
    report.read(_messages(source, report, **options), lambda *_: None)
    report.show(json_file == "-")
    report.write(json_file, source)
    sys.exit(report.code())


@events.command(epilog=EXIT_CODES)
@click.argument("source")
@_source_options
@_JSON
def tail(source: str, json_file: str | None, **options: Any) -> None:
    """Print each event in one line, and at the end the blocks of each medium.

    SOURCE is an endpoint, tcp://HOST:PORT or ipc://PATH, or a recording.
    """
    from kvview.testing.events.stream_fold import StreamFold

    is_quiet = json_file == "-"
    report = _Report(StreamFold())

    def show(message: Message, batch: Batch | None, found: list[Finding]) -> None:
        for event in () if batch is None else batch.events:
            echo(f"{message.sequence:>8} {_line(event)}", err=is_quiet)
        for finding in found:
            echo(f"{finding.sequence:>8} ! {finding.law}: {finding.what}", err=is_quiet)

    report.read(_messages(source, report, **options), show)
    report.show_held(is_quiet)
    report.write(json_file, source)
    sys.exit(report.code())


@events.command(epilog=EXIT_CODES)
@click.argument("endpoint")
@click.argument("file", type=OutputFile(may_be_stdout=False))
@_source_options
def record(endpoint: str, file: str, **options: Any) -> None:
    """Write the messages of ENDPOINT into FILE (.jsonl, or .jsonl.gz)."""
    from kvview.events.recording import Recording
    from kvview.testing.events.stream_fold import StreamFold

    if "://" not in endpoint:
        raise ConfigError(
            f"{endpoint!r} is not an endpoint: expected tcp://HOST:PORT or ipc://PATH"
        )
    report = _Report(StreamFold())
    messages = _messages(endpoint, report, **options)  # checked before a file is overwritten
    with Recording(file) as recording:
        report.read(messages, lambda message, *_: recording.write(message))
    echo(f"{report.fold.num_messages} messages in {file}")
    sys.exit(report.code())


def _messages(
    source: str,
    report: _Report,
    *,
    messages: int | None,
    seconds: float | None,
    topic: str,
    replay_from: str | None,
) -> Iterator[Message]:
    from kvview.events.channel import Listener

    found = _recorded(source, topic)
    if "://" in source:
        found = _live(Listener(source, replay_from, topic=topic), report, seconds)
    elif replay_from is not None or seconds is not None:
        raise ConfigError(f"--replay-from and --seconds need an endpoint. {_SOURCE}")
    return islice(found, messages)


def _recorded(source: str, topic: str) -> Iterator[Message]:
    from kvview.events.recording import read_recording

    return (message for message in read_recording(source) if message.topic.startswith(topic))


def _live(listener: Listener, report: _Report, seconds: float | None) -> Iterator[Message]:
    """Yield messages in order, with missed messages in their places."""
    start = time.monotonic()
    end = None if seconds is None else start + seconds
    hint_at = start + _SILENCE_S
    with listener:
        while end is None or time.monotonic() < end:
            if time.monotonic() > hint_at and not report.fold.num_messages:
                echo("kvview: no message has arrived yet; check the endpoint", err=True)
                hint_at = math.inf
            left = 0.2 if end is None else max(0.0, min(0.2, end - time.monotonic()))
            for message in listener.follow(left, report.note_trouble):
                report.num_replayed = listener.num_replayed
                yield message


@dataclass
class _Report:
    fold: StreamFold
    findings: list[Finding] = field(default_factory=list)
    num_findings: int = 0
    num_replayed: int = 0
    trouble: list[str] = field(default_factory=list)
    num_troubles: int = 0
    has_ended: bool = False

    def read(
        self,
        messages: Iterator[Message],
        handle: Callable[[Message, Batch | None, list[Finding]], object],
    ) -> None:
        """Fold messages until their end or an interrupt, and handle each message."""
        with suppress(KeyboardInterrupt):
            for message in messages:
                batch, found = self.fold.apply(message.sequence, message.payload)
                self.num_findings += len(found)
                self.findings += found[: _KEPT - len(self.findings)]
                handle(message, batch, found)
            self.has_ended = True

    def note_trouble(self, trouble: str) -> None:
        """Count a problem of the connection, and print the first problem of each kind."""
        self.num_troubles += 1
        kinds = {line.partition(":")[0] for line in self.trouble}
        if trouble.partition(":")[0] not in kinds:
            echo(f"kvview: {trouble}", err=True)
            self.trouble.append(trouble)

    def code(self) -> ExitCode:
        if self.num_findings:
            return ExitCode.WRONG
        if not self.has_ended:
            return ExitCode.INTERRUPTED
        if self.trouble or not self.fold.num_messages:
            return ExitCode.NOT_CHECKED
        return ExitCode.CLEAN

    def show(self, is_quiet: bool) -> None:
        """Print the report, to stderr if stdout has the JSON."""
        for finding in self.findings[:_SHOWN]:
            echo(f"message {finding.sequence}: {finding.law}: {finding.what}", err=is_quiet)
        if self.num_findings > _SHOWN:
            echo(f"... and {self.num_findings - _SHOWN} more findings", err=is_quiet)
        self.show_held(is_quiet)

    def show_held(self, is_quiet: bool = False) -> None:
        fold = self.fold
        formats = ", ".join(fold.formats) or "no format"
        replayed = f", {self.num_replayed} of them replayed" if self.num_replayed else ""
        echo(
            f"{fold.num_messages} messages{replayed}, {fold.num_events.total()} events, {formats}",
            err=is_quiet,
        )
        for medium, held in sorted(fold.held.items()):
            echo(f"{medium}: {len(held)} blocks", err=is_quiet)
        if self.num_troubles > 1:
            echo(
                f"unexpected messages and timeouts: {self.num_troubles}",
                err=is_quiet,
            )
        if fold.num_messages and not fold.knows_all:
            echo("some messages were missed, so the list of blocks is incomplete", err=is_quiet)

    def write(self, json_file: str | None, source: str) -> None:
        from kvview.testing.events.stream_report import StreamReport

        report = StreamReport(
            source=source,
            exit_code=int(self.code()),
            messages=self.fold.num_messages,
            replayed=self.num_replayed,
            events=dict(self.fold.num_events),
            formats=dict(self.fold.formats),
            held={medium: len(held) for medium, held in sorted(self.fold.held.items())},
            knows_all=self.fold.knows_all,
            missing=[(gap.start, gap.stop) for gap in self.fold.gaps],
            num_findings=self.num_findings,
            findings=self.findings,
            trouble=self.trouble,
        )
        write_json(json_file, asdict(report))


def _line(event: WireEvent) -> str:
    from kvview.events.wire import ClearedEvent, RemovedEvent

    if isinstance(event, ClearedEvent):
        return "cleared"
    hashes = [
        block_hash.hex()[:16] if isinstance(block_hash, bytes) else f"{block_hash:016x}"
        for block_hash in event.block_hashes[:3]
    ]
    more = "" if len(event.block_hashes) <= 3 else f" ... ({len(event.block_hashes)})"
    group = "" if event.group_idx is None else f" group {event.group_idx}"
    place = f"{event.medium}{group} {' '.join(hashes)}{more}"
    if isinstance(event, RemovedEvent):
        return f"- {place}"
    return f"+ {place} ({len(event.token_ids)} tokens, blocks of {event.block_size})"
