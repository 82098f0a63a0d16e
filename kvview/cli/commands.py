"""The commands of ``kvview``, found among the entry points and imported when called."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import click

from kvview.cli.output import one_line_errors
from kvview.version import __version__

GROUP = "kvview.commands"


class EntryPointGroup(click.Group):
    """A group whose commands are the entry points :data:`GROUP`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, sorted."""
        return sorted(self._points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of this name."""
        point = self._points().get(cmd_name)
        if point is None:
            return None
        with one_line_errors():
            command: click.Command = point.load()
        return command

    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=GROUP)}


@click.group(cls=EntryPointGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvview")
def cli() -> None:
    """KV-cache connectors: write once, prove on a laptop, run in every engine."""
