"""How many automatic mutants the kit kills, by module; what survives, and why.

    python benchmarks/mutation.py [--area engine] [--mutants 400] [--seed 0] [--fresh 7:120]
        [--processes 2] [--seeds 40] [--verdicts FILE.jsonl] [--page FILE.md]

The mutants, and who judges them, are those of tests/mutation; ``kvview check --self-test``
plays a few of the same. --area tier: those of the store of files and of the guard before a
store. With --verdicts each verdict is written as it comes, and a run
that was ended goes on from there; with more --seeds than before only the survivors are
played, from the first seed that is new. --fresh draws once more, with another seed: none of
the checks was written for what lives of that. Exit code 1: a survivor has no reason in
tests/mutation/survivors.toml, which this prints as it would stand there.
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

HEADS = {
    "engine": """\
# How much the kit sees

<!-- Written by benchmarks/mutation.py --page. -->

Mutants are the reference and the shared code with one place made wrong, drawn with a
seed and spread evenly over the functions. Only `kvview check` decides, over every harness
of the reference and its connectors; the project's own tests are never asked. A mutant
counts as killed when a check or a run fails, when what must be exercised never happens
("not checked"), when it cannot be imported, or when it does not end.

A connector is run here with fewer seeds than the 200 of `kvview check`, so that the rate is
a lower bound. Equivalent mutants count as alive: the rate is of all that were drawn. A kill
stands when checks were added since; what has a reason to live is believed to, and what
lived before is played with what was added since. Checks were added for what lived of the first
draw, so that a fresh one is the fairer question.
""",
    "tier": """\
# How much the kit sees of a store

<!-- Written by benchmarks/mutation.py --area tier --page. -->

Mutants are the store of files, what it is built on, and the guard before a store, with one place
made wrong, drawn with a seed and spread evenly over the functions. Only `kvview check` decides,
over the store alone and with the guard in front; processes that a check starts and kills are wrong
in the same place. Of the random sequences of calls a quarter is played, so that the rate is a
lower bound. The project's own tests are never asked. A mutant counts as killed when a check
fails, when it cannot be imported, or when it does not end. Equivalent mutants count as alive: the
rate is of all that were drawn. Checks were added for what lived of the first draw, so that a fresh
one is the fairer question. The rest of the project has [a page of its own](mutation.md).
""",
}

Draws = Mapping[int, Sequence[trial.Verdict]]
"""The verdicts on what was drawn, by the seed; the first is the one that checks grow from."""


def rate_of(name: str, seed: int, verdicts: Sequence[trial.Verdict]) -> str:
    """How many of a draw were killed, and how."""
    hows = Counter(verdict.how for verdict in verdicts if verdict.is_killed)
    killed = hows.total()
    told = ", ".join(f"{how} {times}" for how, times in hows.most_common())
    rate = f"{killed} of {len(verdicts)} killed, {killed / len(verdicts):.1%}"
    return f"**{name}: {rate}** (seed {seed}; {told}).\n"


def describe(head: str, draws: Draws, account: survivors.Account, *, num_sites: int) -> str:
    """The page."""
    by_id = {one.site.id: one for drawn in draws.values() for one in drawn}
    verdicts = list(by_id.values())
    lived = Counter(one.num_seeds for one in verdicts if not one.is_killed)
    lines = [
        head,
        "Never made wrong:\n",
        *(f"- {what}: {why}." for what, why in operators.LEFT_OUT.items()),
        "",
        *(
            rate_of("A fresh draw" if number else "The draw that checks grew from", seed, drawn)
            for number, (seed, drawn) in enumerate(draws.items())
        ),
        f"Of {num_sites:,} possible ones; below, all that were drawn.\n",
        "| module | mutants | killed | rate |",
        "|---|---|---|---|",
    ]
    played = [f"{times} with {seeds}" for seeds, times in sorted(lived.items()) if seeds]
    if head == HEADS["engine"]:
        lines.insert(
            -2, f"Seeds of each connector that survivors were played with: {'; '.join(played)}.\n"
        )
    by_module = defaultdict(list)
    for verdict in verdicts:
        by_module[verdict.site.module].append(verdict.is_killed)
    for module, fates in sorted(by_module.items()):
        rate = sum(fates) / len(fates)
        lines.append(f"| `{module}` | {len(fates)} | {sum(fates)} | {rate:.0%} |")
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
    """The last verdict on each mutant, of these sources; with ``earlier`` also kills by others.

    Without ``sources`` the last one of any.
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
@click.option("--fresh", multiple=True, metavar="SEED:MUTANTS", help="Another draw, told apart.")
@click.option("--processes", default=2, show_default=True)
@click.option("--seeds", default=judges.SEEDS, show_default=True, help="Of each connector.")
@click.option("--page", type=click.Path(path_type=Path), help="Write docs/mutation.md there.")
@click.option("--verdicts", "log", type=click.Path(path_type=Path))
@click.option("--known", "known_survivors", is_flag=True, help="Believe what has a reason to live.")
@click.option("--earlier", is_flag=True, help="Believe kills by an earlier state of the sources.")
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
    """Play the mutants and tell."""
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

    def tell(verdict: trial.Verdict) -> None:
        fate = verdict.killed_by if verdict.is_killed else "SURVIVES"
        click.echo(f"{verdict.seconds:5.1f} s  {verdict.site.id}: {verdict.site.change}: {fate}")
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
            on_verdict=tell,
        )
    verdicts = [done[site.id] for site in chosen]
    account = survivors.compare(verdicts, sites, entries)
    draws = {number: [done[site.id] for site in some] for number, some in drawn.items()}
    text = describe(HEADS[name], draws, account, num_sites=len(sites))
    if page is not None:
        page.write_text(text)
    click.echo(text[len(HEADS[name]) :])
    for title, ended in (("killed now", account.dead), ("no longer there", account.gone)):
        for entry in ended:
            click.echo(f"survivors.toml: {entry.id} is {title}: take it out")
    for verdict in account.unexplained:
        click.echo(f'\n[[survivor]]\nid = "{verdict.site.id}"')
        click.echo(f'change = {json.dumps(verdict.site.change)}\nkind = ""\nreason = ""')
    click.echo(f"{time.monotonic() - start:.0f} s")
    sys.exit(1 if account.unexplained else 0)


if __name__ == "__main__":
    main()
