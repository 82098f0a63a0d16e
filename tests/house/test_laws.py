"""The index of laws: complete, up to date, and repeated by errors, checks and tests."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from docs.make_laws import pages
from kvview import errors
from kvview.laws import laws
from kvview.testing import all_checks
from tests.house.source_tree import ROOT, files_of_tests, modules

RULES = {
    number
    for module in modules()
    for number in re.findall(
        r"^- ([A-Z]+-\d+) ", ast.get_docstring(module.tree) or "", re.MULTILINE
    )
}
"""The rules of reference and adapter, which are in the docstrings of their modules."""

LAWS_WITHOUT_A_CHECK = {
    "KEY-1": "of functions, in tests/pool/test_keys.py",
    "KEY-2": "of functions, in tests/pool/test_keys.py",
    "KEY-3": "of functions, in tests/pool/test_keys.py",
    # Only kvview implements these.
    **{f"GEO-{number}": "in tests/geometry" for number in range(1, 5)},
    **{f"GUARD-{number}": "in tests/guard" for number in range(1, 8)},
    "TIER-12": "in tests/tier/test_tier_guard.py",
    "CONN-7": "of engines, in tests/connector/test_steps_in_flight.py",
    "CONN-9": "of classes, in tests/connector/test_hook_names.py",
}
"""Laws that the kit does not check, and the place of their tests."""

ERRORS_WITHOUT_A_LAW = {
    "ConfigError": "the user's settings",
    "MissingLibraryError": "the installation",
    "TraceError": "a row of a trace",
    "WireFormatError": "bytes on a wire",
    "HookError": "any exception of a connector",
    "NoFreeBlocksError": "the engine's call of its own pool",
    "UnsupportedContractError": "the installation",
    "UnsupportedEngineError": "the installation",
}
"""Errors that are not about a law; the message of every other error starts with its law."""

NOT_LAWS = {"UTF-8", "SHA-256", "POOL-99"}  # the last one is a law that does not exist

_LAW_ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.KVViewError)
} - {"KVViewError", *ERRORS_WITHOUT_A_LAW}


def _starts_with_a_law(message: ast.expr) -> bool:
    if isinstance(message, ast.BinOp):
        return _starts_with_a_law(message.left)
    if isinstance(message, ast.JoinedStr):
        first = message.values[0]
        if isinstance(first, ast.FormattedValue):  # f"{law}: ..."
            return ast.unparse(first.value).endswith("law")
        return _starts_with_a_law(first)
    return isinstance(message, ast.Constant) and bool(re.match(r"[A-Z]+-\d+: ", str(message.value)))


def messages_without_a_law() -> dict[str, list[str]]:
    """Return the lines that make an error of a law without its number at the start, by file."""
    found = defaultdict(list)
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                if name in _LAW_ERRORS and not (node.args and _starts_with_a_law(node.args[0])):
                    found[module.path].append(f"{module.path}:{node.lineno}: {name}")
    return found


def test_the_pages_are_up_to_date() -> None:
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, "python docs/make_laws.py"


def test_the_numbers_of_a_family_have_no_gap() -> None:
    families = defaultdict(set)
    for law in (*laws(), *RULES):
        family, _, number = law.partition("-")
        families[family].add(int(number))
    for family, numbers in families.items():
        assert numbers == set(range(1, len(numbers) + 1)), family


def test_every_law_that_is_named_exists() -> None:
    known = {*laws(), *RULES, *NOT_LAWS}
    paths = [module.path for module in modules()] + files_of_tests()
    paths += ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"]
    for folder in ("docs", "examples", "benchmarks"):
        paths += [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.*")]
    unknown = {
        f"{path}: {number}"
        for path in paths
        for number in re.findall(
            r"(?<![A-Za-z0-9_-])[A-Z]{2,}-\d+(?![\d-])", (ROOT / path).read_text(encoding="utf-8")
        )
        if number not in known
    }
    assert not unknown, "\n".join(sorted(unknown))


def test_every_law_has_a_check() -> None:
    assert laws().keys() - {check.law for check in all_checks()} == {*LAWS_WITHOUT_A_CHECK}


def test_every_rule_and_every_law_without_a_check_has_a_test() -> None:
    named: set[str] = set()
    for path in files_of_tests():
        if path != "tests/house/test_laws.py" and not path.startswith("tests/mutants/"):
            text = (ROOT / path).read_text(encoding="utf-8")
            named.update(re.findall(r"(?<![A-Za-z0-9_-])[A-Z]{2,}-\d+(?![\d-])", text))
            found = re.findall(r"\bdef test_([a-z]+)_(\d+)(?=[_(])", text)
            named.update(f"{family.upper()}-{number}" for family, number in found)
    assert not {*RULES, *LAWS_WITHOUT_A_CHECK} - named
    assert not RULES & laws().keys()


def test_every_error_of_a_law_starts_with_its_number() -> None:
    found = messages_without_a_law()
    listed = "\n".join(line for lines in found.values() for line in lines)
    assert not found, listed


def test_an_error_without_a_law_exists() -> None:
    assert all(issubclass(getattr(errors, name), Exception) for name in ERRORS_WITHOUT_A_LAW)
