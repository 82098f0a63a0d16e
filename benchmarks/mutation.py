"""Counts the automatic mutants that the kit kills, by module, and lists the survivors.

    python benchmarks/mutation.py [--area engine --area tier --area vllm] [--mutants 400] [--seed 0]
        [--fresh 7:120] [--processes 2] [--seeds 40] [--verdicts FILE.jsonl] [--page FILE.md]
        [--report]

The mutants and the steps of the kit are those of tests/mutation. ``--area tier`` has those of the
store of files and of the guard before a store, and ``--area vllm`` those of the vLLM adapter, which
need the Python of the vLLM lane. The mutants run in random order. With ``--verdicts`` each verdict
is written at once, and an interrupted run continues there; ``--report`` runs nothing, and describes
the mutants that ran. With more ``--seeds`` than before only the survivors run, from the first new
seed. ``--fresh`` draws again with another seed, for which no check was written. The exit code is 1
if a survivor has no reason in tests/mutation/survivors.toml; the missing entries are printed.
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

A mutant is the reference, the shared code or the vLLM adapter with one place made wrong. Mutants
are drawn with a seed and spread evenly over the functions of all modules that a check executes.
Only `kvview check` decides, over every harness of the reference, its connectors, and the adapter
in vLLM; the project's own tests do not count. A mutant is killed if a check or a run fails, if a
required event never happens ("not checked"), if its import fails, or if it does not end.

The rate is a lower bound, because a connector runs with fewer seeds here than the 200 of `kvview
check`, and because equivalent mutants count as alive. A fresh draw is the fairer figure, because
no check was added for its survivors. The mutants of a draw run in random order, so those that ran
are a random sample even if the draw did not end.

The draws of 2026-11-23 were over 17 modules that were listed by hand: 341 of 400 killed (85.2%),
and 98 of 120 (81.7%) in a fresh draw; of the store of files and its guard, 82 of 100 in a fresh
draw. A draw of 2026-11-26 was over 92 modules, all that a check executes: 42 of 66 (63.6%). On
2026-11-27 the kit got more targets: handoffs and KVViewOffloadingSpec in vLLM, object stores, and
stores with other options. The canaries of vLLM, texts about hooks that raise, and metrics are no
longer made wrong. The draw of this page was made after that, with 6 seeds of each connector and 10
sequences of calls of each harness; two survivors ran again with 100 sequences. 88 of its mutants
ran first (63 killed, 71.6%), and then 59 more (43 killed, 72.9%). After that, the simulation in
vLLM published KV events, and the two survivors in their conversion that are still in the sources
ran again: one of them was killed.
"""

_SAME = ("equivalent", "performance")  # kinds of survivors with the results of the right code
Draws = Mapping[int, Sequence[trial.Verdict]]
"""The verdicts of each draw, by seed; checks were added for the first draw."""


def rate_of(name: str, seed: int, verdicts: Sequence[trial.Verdict], num_drawn: int) -> str:
    """Return the rate of kills of a draw, by the kind of kill."""
    hows = Counter(verdict.how for verdict in verdicts if verdict.is_killed)
    killed, ran = hows.total(), len(verdicts)
    kinds = ", ".join(f"{how} {times}" for how, times in hows.most_common())
    unreached = sum(not one.is_killed and not one.num_steps for one in verdicts)
    part = "" if ran == num_drawn else f"; {ran} of {num_drawn} drawn mutants ran"
    cpu = sum(verdict.cpu_seconds for verdict in verdicts)
    each = f"; {cpu / 60:.0f} CPU minutes" if cpu else ""
    return (
        f"**{name}: {killed} of {ran} killed, {killed / max(ran, 1):.1%}** "
        f"(seed {seed}{part}; {kinds}{each}). Of the survivors, {unreached} are in statements "
        f"that no check executes.\n"
    )


def describe(
    draws: Draws, account: survivors.Account, *, num_sites: int, num_drawn: Mapping[int, int]
) -> str:
    """Return the page."""
    by_id = {one.site.id: one for drawn in draws.values() for one in drawn}
    verdicts = list(by_id.values())
    lived = Counter(one.num_seeds for one in verdicts if not one.is_killed)
    kinds = Counter(entry.kind for _, entry in account.explained)
    lines = [
        HEAD,
        "These places are never made wrong:\n",
        *(f"- {places}: {reason}." for places, reason in operators.LEFT_OUT.items()),
        *(
            f"- {', '.join(f'`{module}`' for module in modules)}: {reason}."
            for reason, modules in _by_reason(trial.NEVER_WRONG).items()
        ),
        "",
        *(
            rate_of(_name(number, len(draws)), seed, drawn, num_drawn[seed])
            for number, (seed, drawn) in enumerate(draws.items())
            if drawn
        ),
        f"There are {num_sites:,} possible mutants.\n",
    ]
    played = [f"{times} with {seeds}" for seeds, times in sorted(lived.items()) if seeds]
    if played:
        lines.append(f"Survivors by the number of seeds of each connector: {'; '.join(played)}.\n")
    same = [one for one, entry in account.explained if entry.shown and entry.kind in _SAME]
    if same:
        killed, others = sum(one.is_killed for one in verdicts), len(verdicts) - len(same)
        lines.append(
            f"Without the {len(same)} survivors that are shown to give the same results: {killed} "
            f"of {others} killed, {killed / others:.1%}.\n"
        )
    if kinds:
        counted = ", ".join(f"{times} {kind}" for kind, times in kinds.most_common())
        shown = sum(bool(entry.shown) for _, entry in account.explained)
        lines.append(
            f"Survivors by kind: {counted}. A test executes the reason of {shown} of them with the "
            "right code and with the mutant.\n"
        )
    lines += ["| module | mutants | killed | rate |", "|---|---|---|---|"]
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
            mark = " *(executed)*" if entry.shown else ""
            place = entry.id.replace(":", "`: `", 1)
            lines.append(f"- `{place}`: `{one.site.change}`. {entry.reason}{mark}")
        if of_kind:
            lines.append("")
    if account.unexplained:
        lines.append(f"### no reason yet ({len(account.unexplained)})\n")
        lines += [f"- `{one.site.id}`: `{one.site.change}`" for one in account.unexplained]
    return "\n".join(lines).rstrip() + "\n"


def _name(number: int, num_draws: int) -> str:
    return "The fresh draw" if number or num_draws == 1 else "The first draw"


def _by_reason(reasons: Mapping[str, str]) -> Mapping[str, Sequence[str]]:
    names = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(name)
    return names


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
@click.option(
    "--area", "names", type=click.Choice([*trial.AREAS]), multiple=True, default=["engine"]
)
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
@click.option("--report", is_flag=True, help="Run no mutant; describe those that ran.")
@click.option("--earlier", is_flag=True, help="Accept kills by an earlier state of the sources.")
def main(
    names: Sequence[str],
    num_mutants: int,
    seed: int,
    fresh: Sequence[str],
    processes: int,
    seeds: int,
    page: Path | None,
    log: Path | None,
    known_survivors: bool,
    report: bool,
    earlier: bool,
) -> None:
    """Run the mutants, and print the verdicts."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends its processes too
    start = time.monotonic()
    trial.warm_up(with_vllm="vllm" in names)
    sources = trial.fingerprint()
    reach = [
        one
        for name in names
        for one in trial.measure_reach(
            trial.AREAS[name], name, num_seeds=seeds, num_processes=processes
        )
    ]
    modules = sorted({module for one in reach for module in one.modules})
    sites = trial.all_sites(modules)
    entries = survivors.of_modules(survivors.read_survivors(), modules)
    drawn = {seed: operators.sample(sites, num_mutants, seed)}
    for text in fresh:
        another, _, num_more = text.partition(":")
        drawn[int(another)] = operators.sample(sites, int(num_more), int(another))
    chosen = list({site.id: site for some in drawn.values() for site in some}.values())
    known = read_verdicts(log, sites, "" if report else sources, earlier)
    lived = {name: one.num_seeds for name, one in read_verdicts(log, sites).items()}
    done = {
        name: one
        for name, one in known.items()
        if one.is_killed or one.num_seeds >= seeds or report
    }

    def record(verdict: trial.Verdict) -> None:
        outcome = verdict.killed_by if verdict.is_killed else "SURVIVES"
        site = verdict.site
        click.echo(f"{verdict.cpu_seconds:5.1f} s  {site.id}: {site.change}: {outcome}")
        done[verdict.site.id] = verdict
        if log is not None:
            with log.open("a") as file:
                named = {"id": site.id, "change": site.change}
                row = {"sources": sources, **asdict(verdict), "site": named}
                file.write(json.dumps(row) + "\n")

    if known_survivors:
        for one in survivors.believed(chosen, entries, lived):
            done.setdefault(one.site.id, one)
    missing = [site for site in chosen if site.id not in done]
    if missing and not report:
        trial.play(
            missing,
            reach,
            num_processes=processes,
            num_seeds=seeds,
            green={name: one.num_seeds for name, one in known.items()},
            on_verdict=record,
        )
    verdicts = [done[site.id] for site in chosen if site.id in done]
    account = survivors.compare(verdicts, sites, entries)
    draws = {
        number: [done[site.id] for site in some if site.id in done]
        for number, some in drawn.items()
    }
    text = describe(
        draws,
        account,
        num_sites=len(sites),
        num_drawn={number: len(some) for number, some in drawn.items()},
    )
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
