"""Counts the automatic mutants that the kit kills, by module, and lists the survivors.

    python benchmarks/mutation.py [--area engine] [--mutants 400] [--seed 0] [--fresh 7:120]
        [--processes 2] [--seeds 40] [--verdicts FILE.jsonl] [--page FILE.md]

The mutants and the steps of the kit are those of tests/mutation. ``--area tier`` has those of the
store of files and of the guard before a store. With ``--verdicts`` each verdict is written at once,
and an interrupted run continues there; with more ``--seeds`` than before only the survivors run,
from the first new seed. ``--fresh`` draws again with another seed, for which no check was written.
The exit code is 1 if a survivor has no reason in tests/mutation/survivors.toml; the missing entries
are printed.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.mutation import judges, operators, survivors, trial  # noqa: E402

HEAD = """\
# How much the kit sees

<!-- Written by benchmarks/mutation.py --page. -->

A mutant is the reference or the shared code with one place made wrong. Mutants are drawn with a
seed and spread evenly over the functions. Only `kvview check` decides, over every harness of the
reference and its connectors; the project's own tests do not count. A mutant is killed if a check
or a run fails, if a required event never happens ("not checked"), if its import fails, or if it
does not end.

The rate is a lower bound, because a connector runs with fewer seeds here than the 200 of `kvview
check`, and because equivalent mutants count as alive. A kill remains valid when checks are added.
Mutants with a reason to live do not run again; earlier survivors run with the new checks. The fresh
draw is the fairer figure, because checks were added for the survivors of the first draw.
"""

Draws = Mapping[int, Sequence[trial.Verdict]]
"""The verdicts of each draw, by seed; checks were added for the first draw."""


def rate_of(name: str, seed: int, verdicts: Sequence[trial.Verdict]) -> str:
    """Return the rate of kills of a draw, by the kind of kill."""
    hows = Counter(verdict.how for verdict in verdicts if verdict.is_killed)
    killed = hows.total()
    kinds = ", ".join(f"{how} {times}" for how, times in hows.most_common())
    rate = f"{killed} of {len(verdicts)} killed, {killed / len(verdicts):.1%}"
    return f"**{name}: {rate}** (seed {seed}; {kinds}).\n"


def describe(draws: Draws, account: survivors.Account, *, num_sites: int) -> str:
    """Return the page."""
    by_id = {one.site.id: one for drawn in draws.values() for one in drawn}
    verdicts = list(by_id.values())
    lived = Counter(one.num_seeds for one in verdicts if not one.is_killed)
    lines = [
        HEAD,
        "These places are never made wrong:\n",
        *(f"- {places}: {reason}." for places, reason in operators.LEFT_OUT.items()),
        "",
        *(
            rate_of("The fresh draw" if number else "The first draw", seed, drawn)
            for number, (seed, drawn) in enumerate(draws.items())
        ),
        f"There are {num_sites:,} possible mutants. The table has all drawn ones.\n",
        "| module | mutants | killed | rate |",
        "|---|---|---|---|",
    ]
    played = [f"{times} with {seeds}" for seeds, times in sorted(lived.items()) if seeds]
    if played:
        lines.insert(
            -2, f"Survivors by the number of seeds of each connector: {'; '.join(played)}.\n"
        )
    by_module = defaultdict(list)
    for verdict in verdicts:
        by_module[verdict.site.module].append(verdict.is_killed)
    for module, kills in sorted(by_module.items()):
        rate = sum(kills) / len(kills)
        lines.append(f"| `{module}` | {len(kills)} | {sum(kills)} | {rate:.0%} |")
    lines.append("\n## Survivors\n")
    for kind, meaning in survivors.KINDS.items():
        of_kind = [(one, entry) for one, entry in account.explained if entry.kind == kind]
        if of_kind:
            lines.append(f"### {kind}: {meaning} ({len(of_kind)})\n")
        for one, entry in sorted(of_kind, key=lambda pair: pair[1].id):
            lines.append(f"- `{entry.id}`: `{one.site.change}`. {entry.reason}")
        if of_kind:
            lines.append("")
    if account.unexplained:
        lines.append(f"### no reason yet ({len(account.unexplained)})\n")
        lines += [f"- `{one.site.id}`: `{one.site.change}`" for one in account.unexplained]
    return "\n".join(lines).rstrip() + "\n"


def read_verdicts(
    log: Path | None, sites: Sequence[operators.Site], sources: str = "", earlier: bool = True
) -> dict[str, trial.Verdict]:
    """Return the last verdict on each mutant for these sources, or for any if there are none.

    With ``earlier``, kills for other sources count too.
    """
    by_id = {site.id: site for site in sites}
    verdicts = {}
    for line in log.read_text().splitlines() if log and log.is_file() else ():
        row = json.loads(line)
        is_now, site = row.pop("sources") == sources, by_id.get(row["site"]["id"])
        if site is None or site.change != row["site"]["change"]:
            continue
        if is_now or not sources or (earlier and row["how"]):
            verdicts[site.id] = trial.Verdict(**{**row, "site": site})
    return verdicts


@click.command(help=__doc__)
@click.option("--area", "name", type=click.Choice([*trial.AREAS]), default="engine")
@click.option("--mutants", "num_mutants", default=400, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--fresh", multiple=True, metavar="SEED:MUTANTS", help="Another draw, reported apart."
)
@click.option("--processes", default=2, show_default=True)
@click.option("--seeds", default=judges.SEEDS, show_default=True, help="Of each connector.")
@click.option("--page", type=click.Path(path_type=Path), help="Write docs/mutation.md there.")
@click.option("--verdicts", "log", type=click.Path(path_type=Path))
@click.option(
    "--known",
    "known_survivors",
    is_flag=True,
    help="Skip mutants that have a reason.",
)
@click.option("--earlier", is_flag=True, help="Accept kills by an earlier state of the sources.")
def main(
    name: str,
    num_mutants: int,
    seed: int,
    fresh: Sequence[str],
    processes: int,
    seeds: int,
    page: Path | None,
    log: Path | None,
    known_survivors: bool,
    earlier: bool,
) -> None:
    """Run the mutants, and print the verdicts."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends its processes too
    start = time.monotonic()
    trial.warm_up()
    sources = trial.fingerprint()
    area = trial.AREAS[name]
    sites = trial.all_sites(area.modules)
    entries = survivors.of_modules(survivors.read_survivors(), area.modules)
    drawn = {seed: operators.sample(sites, num_mutants, seed)}
    for text in fresh:
        another, _, num_more = text.partition(":")
        drawn[int(another)] = operators.sample(sites, int(num_more), int(another))
    chosen = list({site.id: site for some in drawn.values() for site in some}.values())
    known = read_verdicts(log, sites, sources, earlier)
    lived = {name: one.num_seeds for name, one in read_verdicts(log, sites).items()}
    done = {name: one for name, one in known.items() if one.is_killed or one.num_seeds >= seeds}

    def record(verdict: trial.Verdict) -> None:
        outcome = verdict.killed_by if verdict.is_killed else "SURVIVES"
        click.echo(f"{verdict.seconds:5.1f} s  {verdict.site.id}: {verdict.site.change}: {outcome}")
        done[verdict.site.id] = verdict
        if log is not None:
            with log.open("a") as file:
                site = {"id": verdict.site.id, "change": verdict.site.change}
                row = {"sources": sources, **asdict(verdict), "site": site}
                file.write(json.dumps(row) + "\n")

    if known_survivors:
        for one in survivors.believed(chosen, entries, lived):
            done.setdefault(one.site.id, one)
    if missing := [site for site in chosen if site.id not in done]:
        trial.play(
            missing,
            trial.measure_reach(
                area.subjects,
                num_seeds=seeds,
                num_processes=processes,
                modules=area.modules,
                cache_name=name,
            ),
            num_processes=processes,
            num_seeds=seeds,
            green={name: one.num_seeds for name, one in known.items()},
            on_verdict=record,
        )
    verdicts = [done[site.id] for site in chosen]
    account = survivors.compare(verdicts, sites, entries)
    draws = {number: [done[site.id] for site in some] for number, some in drawn.items()}
    text = describe(draws, account, num_sites=len(sites))
    if page is not None:
        page.write_text(text)
    click.echo(text[len(HEAD) :])
    for title, ended in (("killed now", account.dead), ("no longer in the sources", account.gone)):
        for entry in ended:
            click.echo(f"survivors.toml: {entry.id} is {title}; remove it")
    for verdict in account.unexplained:
        click.echo(f'\n[[survivor]]\nid = "{verdict.site.id}"')
        click.echo(f'change = {json.dumps(verdict.site.change)}\nkind = ""\nreason = ""')
    click.echo(f"{time.monotonic() - start:.0f} s")
    sys.exit(1 if account.unexplained else 0)


if __name__ == "__main__":
    main()
