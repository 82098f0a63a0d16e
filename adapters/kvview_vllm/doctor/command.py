"""``kvview doctor``."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click
from rich.table import Column, Table
from rich.text import Text

from kvview.cli.console import Console
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import json_option, write_json
from kvview_vllm.doctor import Diagnosis, diagnose


@click.command()
@json_option({"doctor": "kvview_vllm.doctor.diagnosis:Diagnosis"})
def doctor(json_file: str | None) -> None:
    """Report the version of the installed vLLM, and whether kvview fits it.

    Run the command on the engine's machine, with the engine's environment.
    """
    found = diagnose()
    if json_file != "-":
        _show_diagnosis(found)
    write_json(json_file, asdict(found))
    sys.exit(ExitCode.CLEAN if found.is_healthy else ExitCode.WRONG)


def _show_diagnosis(found: Diagnosis) -> None:
    version = f"vLLM {found.version}" if found.version else "no vLLM"
    title = f"{version} (tested: {found.tested})"
    table = Table(Column("seam", overflow="fold"), "fits", "details", title=title)
    for seam in found.seams:
        table.add_row(seam.seam, "yes" if seam.fits else Text("no", style="red"), seam.detail)
    if found.capabilities:
        flags = ", ".join(name for name, has in found.capabilities.items() if has)
        table.add_row("capabilities", "", flags or "none of the table")
    Console().print(table)
