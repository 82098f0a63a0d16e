"""Counts the automatic mutants that the kit kills, by module, and lists the survivors.

    python benchmarks/mutation.py [--area engine --area tier ...] [--mutants 400] [--seed 0]
        [--seeds 40] [--shard 1/2] [--verdicts FILE.jsonl] [--page FILE.md] [--report]

The mutants and the steps of the kit are those of tests/mutation; each ``--area`` has its own
targets of the kit. Those with ``vllm`` in their names need the Python of the vLLM lane, and fetch
the sources of vLLM. The mutants run in random order. With ``--verdicts`` each verdict is written at
once, and an interrupted run continues there; two shards may share the file. ``--report`` runs
nothing, and describes the verdicts of the file. With more ``--seeds`` than before only the
survivors run. The exit code is 1 if a survivor has no reason in tests/mutation/survivors.toml; the
missing entries are printed.
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

from tests.mutation import areas, judges, operators, reach, survivors, trial  # noqa: E402

HEAD = """\
# How much the kit sees

<!-- Written by benchmarks/mutation.py --page. -->

A mutant is the reference, the shared code or the vLLM adapter with one place made wrong. Mutants
are drawn with a seed and spread evenly over the functions of all modules that a check executes.
Only `kvview check` decides, over every harness of the reference, its connectors, and the adapter
in the newest and in an old release of vLLM; the project's own tests do not count. A mutant is
killed if a check or a run fails, if a required event never happens ("not checked"), if its import
fails, or if it does not end. If no right target finds a mutant, wrong code runs: the examples of
the [laws](laws.md), a wrong connector for each law, classes with methods that are almost hooks, and
connectors whose hooks raise in vLLM. The mutant is killed if wrong code is not refused any more
("wrong code"). The rate is given with and without these kills.

The rate is a lower bound, because a connector runs with fewer seeds here than the 200 of `kvview
check`, and because equivalent mutants count as alive. A fresh draw is the fairer figure, because
no check was added for its survivors. The mutants of a draw run in random order, so those that ran
are a random sample even if the draw did not end.

The draws of 2026-11-23 were over 17 modules that were listed by hand: 341 of 400 killed (85.2%),
and 98 of 120 (81.7%) in a fresh draw; of the store of files and its guard, 82 of 100 in a fresh
draw. A draw of 2026-11-26 was over 92 modules, all that a check executes: 42 of 66 (63.6%). On
2026-11-27 the kit got more targets: handoffs and KVViewOffloadingSpec in vLLM, object stores, and
stores with other options. The trial run of vLLM, texts about hooks that raise, and metrics are no
longer made wrong. The draw after that had 107 of 145 (73.8%). Then old releases and wrong code
became targets, and the draw of this page was made, with 6 seeds of each connector and 10 sequences
of calls of each harness. Reasons name the survivors that are killed since.
"""

_SAME = ("equivalent", "performance")  # kinds of survivors with the results of the right code


def rate_of(seed: int, verdicts: Sequence[trial.Verdict], num_drawn: int) -> str:
    """Return the rate of kills of a draw, by the kind of kill."""
    hows = Counter(verdict.how for verdict in verdicts if verdict.is_killed)
    killed, ran = hows.total(), len(verdicts)
    kinds = ", ".join(f"{how} {times}" for how, times in hows.most_common())
    unreached = sum(not one.is_killed and not one.num_steps for one in verdicts)
    part = "" if ran == num_drawn else f"; {ran} of {num_drawn} drawn mutants ran"
    cpu = sum(verdict.cpu_seconds for verdict in verdicts)
    by_right = killed - hows["wrong code"]
    places = Counter(verdict.area for verdict in verdicts if verdict.area)
    by_area = ", ".join(f"{name} {times}" for name, times in places.most_common()) or "unknown"
    return (
        f"**The draw: {killed} of {ran} killed, {killed / max(ran, 1):.1%}** "
        f"(seed {seed}{part}; {kinds}; {cpu / 60:.0f} CPU minutes). Without the kills by wrong "
        f"code: {by_right} of {ran}, {by_right / max(ran, 1):.1%}. Kills by area: {by_area}. Of "
        f"the survivors, {unreached} are in statements that no check executes.\n"
    )


def describe(
    verdicts: Sequence[trial.Verdict],
    account: survivors.Account,
    *,
    seed: int,
    num_sites: int,
    num_drawn: int,
) -> str:
    """Return the page."""
    lived = Counter(one.num_seeds for one in verdicts if not one.is_killed)
    kinds = Counter(entry.kind for _, entry in account.explained)
    lines = [
        HEAD,
        "These places are never made wrong:\n",
        *(f"- {places}: {reason}." for places, reason in operators.LEFT_OUT.items()),
        *(
            f"- {', '.join(f'`{module}`' for module in modules)}: {reason}."
            for reason, modules in _by_reason(areas.NEVER_WRONG).items()
        ),
        "",
        rate_of(seed, verdicts, num_drawn),
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


def shard_of(text: str) -> slice:
    """Return the slice of a shard, such as "1/2" for the first of two."""
    number, _, num_shards = text.partition("/")
    return slice(int(number) - 1, None, int(num_shards))


@click.command(help=__doc__)
@click.option(
    "--area",
    "names",
    type=click.Choice([*areas.AREAS]),
    multiple=True,
    default=[name for name in areas.AREAS if "vllm" not in name],
    show_default=True,
)
@click.option("--mutants", "num_mutants", default=400, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--seeds", default=judges.SEEDS, show_default=True, help="Of each connector.")
@click.option("--shard", default="1/1", show_default=True, help="Part of the draw that runs.")
@click.option("--page", type=click.Path(path_type=Path), help="Write docs/mutation.md there.")
@click.option("--verdicts", "log", type=click.Path(path_type=Path))
@click.option("--report", is_flag=True, help="Run no mutant; describe the verdicts of the file.")
@click.option("--earlier", is_flag=True, help="Accept kills by an earlier state of the sources.")
def main(
    names: Sequence[str],
    num_mutants: int,
    seed: int,
    seeds: int,
    shard: str,
    page: Path | None,
    log: Path | None,
    report: bool,
    earlier: bool,
) -> None:
    """Run the mutants, and print the verdicts."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends its processes too
    start = time.monotonic()
    modules = sorted({one for area in areas.AREAS.values() for one in area.modules})
    sites = trial.all_sites(modules)
    if report:
        verdicts = list(read_verdicts(log, sites).values())
    else:
        verdicts = run(names, num_mutants, seed, seeds, shard, log, earlier)
    entries = survivors.read_survivors()
    account = survivors.compare(verdicts, sites, entries)
    text = describe(verdicts, account, seed=seed, num_sites=len(sites), num_drawn=num_mutants)
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


def run(
    names: Sequence[str],
    num_mutants: int,
    seed: int,
    seeds: int,
    shard: str,
    log: Path | None,
    earlier: bool,
) -> list[trial.Verdict]:
    """Run the mutants of a shard that have no verdict yet, and return all verdicts of the shard."""
    sources = reach.fingerprint()
    with trial.open_rooms(names, seeds) as rooms:
        reached = {name for room in rooms.values() for one in room(None) for name in one.modules}
        sites = trial.all_sites(sorted(reached))
        chosen = operators.sample(sites, num_mutants, seed)[shard_of(shard)]
        done = {
            name: one
            for name, one in read_verdicts(log, sites, sources, earlier).items()
            if one.is_killed or one.num_seeds >= seeds
        }
        for site in chosen:
            if site.id in done:
                continue
            verdict = done[site.id] = trial.judge(site, rooms)
            outcome = verdict.killed_by if verdict.is_killed else "SURVIVES"
            click.echo(f"{verdict.cpu_seconds:5.1f} s  {site.id}: {site.change}: {outcome}")
            if log is not None:
                with log.open("a") as file:
                    named = {"id": site.id, "change": site.change}
                    row = {"sources": sources, **asdict(verdict), "site": named}
                    file.write(json.dumps(row) + "\n")
    return [done[site.id] for site in chosen]


if __name__ == "__main__":
    main()
