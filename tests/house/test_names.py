"""One name, one thing: public classes, and modules of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.house.source_tree import ROOMS, modules

SAME_MODULE_NAME = {
    "check": "the check of a connector: in simulated runs, and with real tokens",
    "command": "a command of the command line, in the package that it runs",
    "engine": "the engine of a floor",
    "harness": "the engines of a handoff for the kit, and the reference's suites",
    "machine": "the state machine of a contract",
    "model": "the executable model of a contract, and a model whose KV is sized",
    "queries": "the optional queries of a view, and of the view that guards it",
    "request": "a request, as the connector and as the engine see it",
    "run": "one run: of a scenario, and of a trace",
    "scenario": "the scenarios of seeds, and their data",
    "simulation": "an engine under `kvview check`",
    "suite": "the suite of a contract, from which implementers derive their class",
    "view": "the view of the pool, and the view that guards it",
    "walks": "walks over a pool's free queue: done, and checked",
    "worker": "the half next to the bytes: of transfers, and of vLLM's connector",
}
"""Modules with the same name, and its common meaning."""

WAITING = {
    "Capability": "of an implementation (the kit's harness), and of a vLLM release",
    "scheduler": "three in the adapter: ViewScheduler, half of a connector, a real one on a CPU",
}
"""Names that still mislead and should change."""


def test_no_public_class_name_means_two_things() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.path)
    double = {name for name, paths in places.items() if len(paths) > 1}
    double -= set(WAITING)
    assert not double, {name: places[name] for name in sorted(double)}


def test_no_module_name_means_two_things() -> None:
    places = defaultdict(list)
    for module in modules():
        *_, stem = module.name.split(".")
        is_room = stem in ROOMS and module.name.count(".") <= 2
        if not is_room and not stem.startswith(("__", "kvview")):
            places[stem].append(module.path)
    double = {name for name, paths in places.items() if len(paths) > 1}
    double -= set(WAITING)
    assert double == set(SAME_MODULE_NAME), {name: places[name] for name in sorted(double)}


def test_every_exception_is_in_use() -> None:
    names = {node.name for m in modules() for node in m.tree.body if isinstance(node, ast.ClassDef)}
    names |= {module.name.rpartition(".")[2] for module in modules()}
    assert {*SAME_MODULE_NAME, *WAITING} <= names
