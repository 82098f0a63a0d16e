"""Errors in one line, reports in files, and types of options, for every command."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from kvview.cli.echo import echo
from kvview.cli.exit_codes import ExitCode
from kvview.errors import ConfigError, ConnectorError, HookError, KVViewError, line_of

_STDOUT = "kvview.stdout"
VERBOSE = "kvview.verbose"
"""Key of the flag --verbose in the ``meta`` of a command's context."""

_MOST = 2**63 - 1
_EXTRAS = {
    "click": "cli",
    "rich": "cli",
    "torch": "reference",
    "numpy": "reference",
    "hypothesis": "cli",
    "pytest": "testing",
    "msgspec": "events",
    "zmq": "events",
    "xxhash": "tier",
    "obstore": "objects",
    "matplotlib": "chart",
}


def report_error(error: Exception, is_verbose: bool) -> ExitCode:
    """Print the error of a command to stderr in one line; print the traceback of a bug too.

    Args:
        error: The exception that the command raised.
        is_verbose: Whether to print the traceback of every error.
    """
    known = missing_extra(error) or refused_by_the_system(error)
    text = known or line_of(error)
    if isinstance(error, HookError):
        code = ExitCode.CONNECTOR_RAISED
    elif isinstance(error, ConnectorError):
        code = ExitCode.WRONG
    elif known or isinstance(error, KVViewError):
        code = ExitCode.COULD_NOT_RUN
    else:
        code = ExitCode.BUG
        text = "a bug of kvview or of the command, so no verdict; please report the traceback above"
    if is_verbose or code is ExitCode.BUG:
        for line in "".join(traceback.format_exception(error)).splitlines():
            echo(line, err=True)
    echo(f"kvview: {text}", err=True)
    return code


@contextmanager
def naming(target: str) -> Iterator[None]:
    """Add the name of the connector to every ConnectorError."""
    try:
        yield
    except ConnectorError as error:
        error.args = (f"connector {target}: {error}",)
        raise


def missing_extra(error: BaseException) -> str | None:
    """Return the extra of kvview that has a missing package; None for any other error."""
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f"this needs {error.name}: pip install 'kvview[{_EXTRAS[error.name]}]'"
    return None


def refused_by_the_system(error: BaseException) -> str | None:
    """Return the file and the reason of an OSError; None for any other error."""
    if not isinstance(error, OSError) or not error.strerror:
        return None
    return line_of(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)


class Seconds(click.types.FloatParamType):
    """A waiting time from 0 to 100,000,000 seconds."""

    name = "seconds"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not 0 <= seconds <= 1e8:
            self.fail(f"expected 0 to 100,000,000 seconds, got {seconds:g}", param, ctx)
        return seconds


class Whole(click.types.IntParamType):
    """A whole number of at most 64 bits.

    Args:
        least: The smallest number that is accepted.
    """

    def __init__(self, least: int = -_MOST) -> None:
        self._least = least

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = super().convert(value, param, ctx)
        if not self._least <= number <= _MOST:
            self.fail(f"expected a number from {self._least} to {_MOST}, got {number}", param, ctx)
        return number


class OutputFile(click.ParamType[str]):
    """A file that a command writes at its end; a file that is not writable is refused at the start.

    Args:
        may_be_stdout: Whether "-" stands for stdout.
    """

    name = "file"

    def __init__(self, *, may_be_stdout: bool = True) -> None:
        self._may_be_stdout = may_be_stdout

    @override
    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        option = "FILE" if param is None else param.opts[0]
        if isinstance(param, click.Argument):
            option = param.human_readable_name
        if value != "-":
            _require_writable(option, value)
        elif not self._may_be_stdout:
            raise ConfigError(f"{option} cannot be '-'; pass the name of a file")
        return value


class JSONOption(click.Option):
    """An option for a JSON file with a published schema; see :func:`report_option`.

    Args:
        type: Type of a file that the command reads; by default the command writes the file.
    """

    def __init__(
        self,
        names: list[str],
        *,
        schemas: dict[str, str],
        help: str,
        type: click.ParamType[str] | None = None,
    ) -> None:
        super().__init__(
            names, type=type or OutputFile(), metavar="FILE", help=help, callback=_take_stdout
        )
        self.schemas = schemas


def _take_stdout(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
    """Let the command print to stderr if the report goes to stdout."""
    if value == "-":
        ctx.meta[_STDOUT] = sys.stdout
        ctx.with_resource(redirect_stdout(sys.stderr))
    return value


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def report_option(option: str, name: str, schemas: dict[str, str], text: str) -> Decorator:
    """Make an option for a file that the command writes as JSON.

    Args:
        option: Name of the option.
        name: Name of the function parameter that receives the value.
        schemas: For each name of a schema, the target of the dataclass or pydantic model of a
            report that the command may write; ``docs/make_commands.py`` writes the schemas.
        text: Help text of the option.
    """
    return click.option(option, name, cls=JSONOption, schemas=schemas, help=text)


def json_option(schemas: dict[str, str]) -> Decorator:
    """Make ``--json FILE``, for the report of a command; see :func:`report_option`."""
    text = "Write the report to FILE ('-' for stdout)."
    return report_option("--json", "json_file", schemas, text)


def arguments_of(context: click.Context, ignored: Collection[str]) -> list[str]:
    """Return the arguments that the user gave, to repeat the call of the command.

    Args:
        context: Context of the call.
        ignored: Names of the parameters to exclude.
    """
    arguments: list[str] = []
    for parameter in given_parameters(context):
        name = parameter.name or ""
        value = context.params[name]
        if name in ignored:
            continue
        if isinstance(parameter, click.Argument):
            arguments += value if isinstance(value, tuple) else [value]
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            arguments += parameter.opts
        else:
            several = value if isinstance(value, tuple) else (value,)
            arguments += [f"{parameter.opts[0]}={each}" for each in several]
    return arguments


def given_parameters(context: click.Context) -> Iterator[click.Parameter]:
    """Yield the arguments and options that the user set."""
    for parameter in context.command.params:
        name = parameter.name or ""
        default = click.core.ParameterSource.DEFAULT
        if name in context.params and context.get_parameter_source(name) not in (default, None):
            yield parameter


def target_options(text: str) -> Decorator:
    """Make ``--option KEY=VALUE``, repeatable, for options of the target; ``text`` is the help."""
    return click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help=text)


def _require_writable(option: str, path: str) -> None:
    place = Path(path).absolute()
    if not path or place.is_dir() or not place.parent.is_dir():
        raise ConfigError(f"{option} {path!r}: not a file in an existing folder")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise ConfigError(f"{option} {path!r}: not writable")


def write_json(path: str | None, report: dict[str, Any], option: str = "--json") -> None:
    """Write a report to a file, or to stdout if the path is "-".

    Args:
        path: The value of the option; None writes nothing.
        report: The report.
        option: The option, for the error.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path is None:
        return
    text = json.dumps(report, indent=2) + "\n"
    if path == "-":
        context = click.get_current_context()
        click.echo(text, nl=False, file=context.meta[_STDOUT])
        return
    try:
        # Escape lone surrogates, which a message may quote, so that the report can be written.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{option} {path!r}: {error.strerror}") from error
