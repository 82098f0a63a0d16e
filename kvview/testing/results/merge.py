"""Reads the reports of shards, for one verdict."""

from __future__ import annotations

from collections.abc import Sequence

from kvview.errors import ConfigError, line_of
from kvview.input_files import read_file
from kvview.testing.results.schema import ReportModel, RunsModel


def read_shards(paths: Sequence[str]) -> tuple[str, list[RunsModel]]:
    """Read the reports of shards; returns their target and their runs.

    Raises:
        ConfigError: A file is not the report of a shard, or the reports have different targets or
            versions.
    """
    reports = [_read(path) for path in paths]
    first = reports[0]
    for path, report in zip(paths, reports, strict=True):
        if (report.target, report.versions) != (first.target, first.versions):
            raise ConfigError(
                f"{path}: the report is about {report.target} with other versions than {paths[0]}, "
                f"about {first.target}; merge the shards of one check"
            )
    return first.target, [report.runs for report in reports if report.runs is not None]


def _read(path: str) -> ReportModel:
    from pydantic import ValidationError

    try:
        report = ReportModel.model_validate_json(read_file(path))
    except OSError as error:
        raise ConfigError(f"{path}: the report cannot be read: {error.strerror}") from error
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"]))
        raise ConfigError(
            f"{path}: not a report of kvview check --json: {place} {line_of(wrong['msg'])}".rstrip()
        ) from error
    if report.runs is None or report.runs.shard is None:
        raise ConfigError(f"{path}: not the report of a shard; run kvview check with --shard K/N")
    return report
