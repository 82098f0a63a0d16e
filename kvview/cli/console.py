"""Tables, colours and progress on the terminal, drawn by rich; untrusted text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich import console as rich_console
from rich.console import ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from kvview.errors import printable


class Console(rich_console.Console):
    """A console that prints control characters as escapes (see :mod:`kvview.cli.echo`).

    Args:
        stderr: Whether to print to stderr.
        markup: Whether brackets in a string are markup; if True, untrusted text must be escaped.
        width: Number of columns; None for the width of the terminal.
    """

    def __init__(
        self,
        *,
        stderr: bool = False,
        markup: bool = False,
        width: int | None = None,
    ) -> None:
        super().__init__(stderr=stderr, markup=markup, emoji=False, width=width)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object, with escapes in place of control characters."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text.isprintable():
                yield segment
            else:
                text = "\n".join(map(printable, text.split("\n")))
                yield Segment(text, segment.style)


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Show a title, followed by the latest text that was passed to the yielded function."""
    console = Console(stderr=True)
    if not console.is_terminal:  # no progress, because a file or a pipe would receive empty lines
        yield lambda text: None
        return
    # No refresh by a thread, because kvview check forks the processes that run seeds.
    with Live(Text(title), console=console, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(f"{title}: {text}"), refresh=True)
