"""One name, one thing: public classes."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.house.source_tree import modules


def test_no_public_class_name_means_two_things() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.path)
    double = {name for name, paths in places.items() if len(paths) > 1}
    assert not double, {name: places[name] for name in sorted(double)}
