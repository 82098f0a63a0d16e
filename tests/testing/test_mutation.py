"""The mutator itself: a tiny module, a tiny judge."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import areas, controls, operators, reach, reasons, survivors, trial
from tests.mutation.judges import Step, Subject, WrongCode
from tests.mutation.processes import Room

SOURCE = '''
"""A module."""

def first(items: list[int], limit: int = 2) -> list[int]:
    """Text that says 1 < 2."""
    assert limit > 0
    taken = []
    for item in items:
        if item < limit:
            taken.append(item)
        else:
            continue
    if not taken:
        raise ValueError(f"none below {limit + 1}", 1)
    return taken[:limit]

def endless(num: int) -> int:
    while num > 0:
        num -= 1
    return num

def never(num: int) -> int:
    return num + 1
'''


def sites() -> list[operators.Site]:
    return operators.find_sites("tiny", SOURCE)


def test_every_place_is_found_and_nothing_that_is_only_text() -> None:
    found = {(site.function, site.operator, site.change) for site in sites()}
    assert found == {
        ("first", "plus 1", "2 -> 3"),
        ("first", "minus 1", "2 -> 1"),
        ("first", "no loop", "for ... in items -> in ()"),
        ("first", "negated", "if item < limit -> if not ..."),
        ("first", "no else", "else: continue -> no else"),
        ("first", "compare", "item < limit -> item <= limit"),
        ("first", "removed", "taken.append(item) -> pass"),
        ("first", "removed", "continue -> pass"),
        ("first", "not", "not taken -> taken"),
        ("first", "removed", "raise ValueError(f'none below {limit + 1}', 1) -> pass"),
        ("first", "returns empty", "return taken[:limit] -> return []"),
        ("first", "slice", ":limit -> :"),
        ("endless", "negated", "if num > 0 -> if not ..."),
        ("endless", "compare", "num > 0 -> num >= 0"),
        ("endless", "plus 1", "0 -> 1"),
        ("endless", "minus 1", "0 -> -1"),
        ("endless", "arithmetic", "num -= 1 -> num += 1"),
        ("endless", "removed", "num -= 1 -> pass"),
        ("endless", "plus 1", "1 -> 2"),
        ("endless", "minus 1", "1 -> 0"),
        ("endless", "returns empty", "return num -> return 0"),
        ("never", "returns empty", "return num + 1 -> return 0"),
        ("never", "arithmetic", "num + 1 -> num - 1"),
        ("never", "plus 1", "1 -> 2"),
        ("never", "minus 1", "1 -> 0"),
    }


def test_each_mutant_differs_from_the_source_in_its_place_only() -> None:
    right = ast.unparse(ast.parse(SOURCE)).splitlines()
    texts = set()
    for site in sites():
        wrong = ast.unparse(operators.mutate("tiny", SOURCE, site.id)).splitlines()
        assert wrong != right
        texts.add("\n".join(wrong))
    assert len(texts) == len(sites())


def test_defaults_are_the_imports() -> None:
    outside = {site.change for site in sites() if not site.is_in_function}
    assert outside == {"2 -> 3", "2 -> 1"}


def test_a_guard_has_the_line_of_its_match() -> None:
    source = (
        "def kind(num):\n match num:\n  case 0:\n   return 1\n  case _ if num < 9:\n   return 2"
    )
    lines = {site.line for site in operators.find_sites("tiny", source) if "num" in site.change}
    assert lines == {2}


def test_ids_do_not_depend_on_other_functions() -> None:
    more = SOURCE.replace(
        "def endless", "def other(num: int) -> int:\n    return -num\n\ndef endless"
    )
    assert {site.id for site in sites()} < {site.id for site in operators.find_sites("tiny", more)}


def test_a_sample_is_even_over_functions_and_grows() -> None:
    many = operators.sample(sites(), 12, seed=3)
    assert operators.sample(sites(), 5, seed=3) == many[:5]
    assert operators.sample(sites(), 12, seed=4) != many
    assert sorted(site.function for site in many) == ["endless"] * 4 + ["first"] * 4 + ["never"] * 4


def test_statements_that_are_executed_are_counted() -> None:
    hits: set[reach.Place] = set()
    path = Path(__file__).with_name("tiny.py")

    class Tiny(type(path)):  # type: ignore[misc]
        def read_text(self, *args: Any, **kwargs: Any) -> str:
            return SOURCE

    names: dict[str, Any] = {}
    exec(reach.counting("tiny", Tiny(path), hits), names)
    assert not hits
    assert names["first"]([1, 5]) == [1]
    lines = {line for _, line in hits}
    text = SOURCE.splitlines()
    assert text.index("            continue") + 1 in lines
    assert not any(text[line - 1].lstrip().startswith(("raise", "while")) for line in lines)


@dataclass(frozen=True)
class Tells(Step):
    """A kit of one check."""

    def run(self, coverage: Counter[str]) -> str | None:
        import tiny  # type: ignore[import-not-found]

        if tiny.endless(3) != 0:
            return "endless is wrong"
        return "first is wrong" if tiny.first([1, 5]) != [1] else None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_kit_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trial, "AT_LEAST", 0.5)
    monkeypatch.setattr(reach, "AT_LEAST", 0.5)
    of_tiny = {site.change: site for site in operators.find_sites("tiny", SOURCE)}
    reached = frozenset(("tiny", site.line) for site in sites() if site.function != "never")
    step = Tells(Subject("tiny:first"), range(1))
    chosen = [
        of_tiny["item < limit -> item <= limit"],  # nothing is equal to the limit
        of_tiny["return taken[:limit] -> return []"],
        of_tiny["num -= 1 -> num += 1"],
        of_tiny["num > 0 -> num >= 0"],
        of_tiny["num + 1 -> num - 1"],  # it is never called
    ]
    verdicts = [trial.play(site, [reach.Reach(step, reached, 0.0)]) for site in chosen]
    assert [(verdict.how, verdict.num_steps) for verdict in verdicts] == [
        ("", 1),
        ("check", 1),
        ("timeout", 1),
        ("check", 1),
        ("", 0),
    ]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_each_area_has_its_own_process_up_to_the_first_finding() -> None:
    site = sites()[0]

    def area(how: str) -> Callable[[], Callable[[operators.Site], trial.Verdict]]:
        return lambda: lambda site: verdict(site, how)

    rooms = {name: Room(area(how)) for name, how in (("tier", ""), ("wrong", "died"))}
    rooms["wrong in vllm"] = Room(area("check"))
    try:
        found = trial.judge(site, rooms)
    finally:
        for room in rooms.values():
            room.close()
    assert (found.area, found.how, found.num_steps) == ("wrong", "wrong code", 2)
    with pytest.raises(RuntimeError, match="has ended"):
        Room(lambda: sys.exit(1))


def test_wrong_classes_are_refused_and_helpers_are_not() -> None:
    assert not [name for name, is_right in controls.classes() if not is_right()]
    code = WrongCode("tests.mutation.controls:classes")
    assert code.run(range(3), Counter()) is None
    assert len([*code.steps(6)]) == len(controls.classes())


def verdict(site: operators.Site, how: str) -> trial.Verdict:
    return trial.Verdict(site, how, how, 1, 0.0)


def test_survivors_need_a_reason_and_reasons_a_survivor(tmp_path: Path) -> None:
    one, two, three, four = sites()[:4]
    file = tmp_path / "survivors.toml"

    def row(name: str, change: str, reason: str = "Nobody sees it.") -> str:
        quoted = f'id = "{name}"\nchange = "{change}"\nkind = "equivalent"\nreason = "{reason}"\n'
        return f"[[survivor]]\n{quoted}"

    file.write_text(
        row(one.id, one.change)
        + row(two.id, "what stood there before")
        + row(three.id, three.change)
        + row("tiny:gone:flag:0", "True -> False")
    )
    entries = survivors.read_survivors(file)
    verdicts = [verdict(one, ""), verdict(two, ""), verdict(three, "check"), verdict(four, "")]
    account = survivors.compare(verdicts, sites(), entries)
    assert [entry.id for _, entry in account.explained] == [one.id]
    assert [one.site for one in account.unexplained] == [two, four]
    assert [entry.id for entry in account.dead] == [three.id]
    assert [entry.id for entry in account.gone] == [two.id, "tiny:gone:flag:0"]
    file.write_text(row(one.id, one.change, reason=" "))
    with pytest.raises(ValueError, match="with a reason"):
        survivors.read_survivors(file)


def test_modules_are_found_by_themselves_except_those_with_a_reason() -> None:
    found = {module for area in areas.AREAS.values() for module in area.modules}
    assert "kvview.connector.job_tracker" in areas.AREAS["engine"].modules
    assert "kvview.tier.guarded" in areas.AREAS["tier"].modules
    assert "kvview_vllm.walks" in areas.AREAS["vllm"].modules
    assert not any(name.startswith("kvview.testing") for name in found)
    assert all(areas.path_of(name).is_file() for name in [*found, *areas.NEVER_WRONG])


def test_every_target_of_the_kit_exists() -> None:
    names = {subject.target for area in areas.AREAS.values() for subject in area.subjects}
    ours = {name for name in names if name.startswith(("tests.", *areas.OWN))}
    assert len(ours) > 20
    for name in ours:
        module, _, attribute = name.partition(":")
        assert f" {attribute}" in areas.path_of(module).read_text(), name


def test_the_file_of_survivors_is_about_the_sources_as_they_are() -> None:
    modules = [module for area in areas.AREAS.values() for module in area.modules]
    account = survivors.compare([], trial.all_sites(modules), survivors.read_survivors())
    assert not account.gone, "take them out, or look at what they have become"


SHOWN = {name: one for name, one in survivors.read_survivors().items() if one.shown}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", SHOWN)
def test_a_reason_holds_when_it_is_executed(name: str) -> None:
    if SHOWN[name].module.startswith("kvview_vllm"):
        pytest.importorskip("vllm.v1.core.block_pool")
    right, wrong = reasons.execute(SHOWN[name])
    assert reasons.is_shown(SHOWN[name], right, wrong), f"right: {right}; wrong: {wrong}"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_wrong_reason_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    of_tiny = {site.change: site for site in operators.find_sites("tiny", SOURCE)}
    site = of_tiny["item < limit -> item <= limit"]

    def holds(kind: str, *functions: str) -> bool:
        code = "\n".join(("import tiny", *functions))
        entry = survivors.Survivor(site.id, site.change, kind, "A reason.", code)
        return reasons.is_shown(entry, *reasons.execute(entry))

    below = "def same(): return tiny.first([1])"
    at_limit = "return tiny.first([1, 2])"
    assert holds("equivalent", below)
    assert not holds("equivalent", f"def same(): {at_limit}")
    assert holds("freedom", below, f"def differs(): {at_limit}")
    assert not holds("performance", below, "def differs(): return 1")
    assert not holds("performance", below)
