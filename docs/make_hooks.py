"""Write the tables of ``docs/hooks.md``: every hook with its arguments and results.

    python docs/make_hooks.py           # write it
    python docs/make_hooks.py --check   # exit 1 when it is not up to date

Nothing is imported. A hook without a word on when it is called is an error here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from docs.parts import ROOT, with_parts, write

PAGE = ROOT / "docs/hooks.md"

_HALVES, _REQUEST, _PLAN, _TRANSFER = (
    f"kvview/{name}.py"
    for name in ("connector/halves", "connector/request", "connector/plan", "transfer")
)
_HOOKS = {
    "SchedulerConnector": {
        "bind_gpu_block_pool_view": "once, before any other",
        "on_engine_ready": "once, right after `bind_gpu_block_pool_view`",
        "match_prefix": "before a waiting request gets blocks; perhaps again",
        "on_blocks_allocated": "right after `match_prefix`, when a request gets blocks",
        "plan_step": "once per step, when all blocks of the step are allocated",
        "on_transfers_finished": "when the worker half has reported, between two plans",
        "on_request_preempted": "when a request loses its blocks to other requests",
        "on_request_finished": "when a request ends, before its blocks are freed",
        "take_events": "at any time",
        "has_pending_work": "when no request is scheduled",
        "reset_cache": "when the engine's caches are reset, after new weights for example",
        "shutdown": "at the end",
    },
    "WorkerConnector": {
        "register_kv_caches": "once, before any other",
        "start_plan": "in each step whose plan has jobs, or belongs to a subclass of StepPlan",
        "get_finished": "in each step",
        "wait": "when the engine cannot continue before the jobs end",
        "shutdown": "at the end, perhaps without any call before",
    },
    "Connector": {
        "make_scheduler": "once, in the process of the scheduler",
        "make_worker": "once, in each process with a GPU",
    },
}
_RECORDS = {
    "kvview/geometry.py": ("CacheGeometry",),
    _HALVES: ("ConnectorConfig", "EngineFacts"),
    _REQUEST: ("RequestInfo", "RequestContent", "StepInfo", "RequestStep", "FullBlock"),
    _PLAN: ("StepPlan", "TransferJob"),
    _TRANSFER: (
        *("GPULoadStoreSpec", "CPULoadStoreSpec", "TransferResult"),
        *("CanonicalKVCaches", "CanonicalKVCacheTensor", "CanonicalKVCacheRef"),
    ),
    "kvview/events/tier.py": ("OffloadingEvent",),
}
_VIEW = ("kvview/pool/view.py", "kvview/pool/queries.py", "kvview/pool/leases.py")
_HELPERS = {
    "kvview/geometry.py": ("CacheGeometry",),
    _REQUEST: ("StepInfo", "full_blocks"),
    "kvview/keys.py": ("make_offload_key", "get_offload_block_hash", "get_offload_group_idx"),
}
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):\n((?: {4}.*\n?|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def page() -> str:
    """The whole of ``docs/hooks.md``."""
    lines = []
    classes = _classes(_HALVES)
    for name, when in _HOOKS.items():
        declared = {node.name: node for node in _functions(classes[name])}
        if list(declared) != list(when):
            raise ValueError(
                f"{name} has the hooks {list(declared)}; add the time of each call to the table"
            )
        lines += [f"## {name}", "", _sections(classes[name])[""], ""]
        lines += ["| hook | when | what | default |", "|---|---|---|---|"]
        for hook, node in declared.items():
            lines.append(_row(_signature(node), when[hook], _what(node), _default(node)))
        lines.append("")
    lines.append("## Arguments and results")
    for path, names in _RECORDS.items():
        classes = _classes(path)
        for name in names:
            lines += ["", f"### {name}", "", _sections(classes[name])[""], ""]
            lines += ["| field | type | what |", "|---|---|---|"]
            lines += [_row(*field) for field in _fields(classes[name])]
    lines += ["", *_calls()]
    return with_parts(PAGE, hooks="\n".join(lines))


def _calls() -> Iterator[str]:
    """The calls of a connector: the view, and helpers for tokens, blocks and keys."""
    yield from (
        "## The view",
        "",
        "`isinstance(view, SupportsLeases)` tests whether a view has leases, for example.",
        "",
    )
    yield from ("| call | of | what |", "|---|---|---|")
    for path in _VIEW:
        for name, protocol in _classes(path).items():
            for method in _functions(protocol):
                yield _row(_signature(method), f"`{name}`", _what(method))
    yield from ("", "## Helpers", "", "| call | of | what |", "|---|---|---|")
    for path, names in _HELPERS.items():
        for name, node in _declared(path).items():
            if name in names and isinstance(node, ast.FunctionDef):
                yield _row(_signature(node, first=0), "`kvview`", _what(node))
            elif name in names and isinstance(node, ast.ClassDef):
                for method in _functions(node):
                    yield _row(_signature(method), f"`{name}`", _what(method))


def _declared(path: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = (node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return {node.name: node for node in found}


def _classes(path: str) -> dict[str, ast.ClassDef]:
    found = _declared(path).items()
    return {name: node for name, node in found if isinstance(node, ast.ClassDef)}


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    public = [other for other in node.body if isinstance(other, ast.FunctionDef)]
    return [other for other in public if not other.name.startswith("_")]


def _sections(node: ast.ClassDef | ast.FunctionDef) -> dict[str, str]:
    """Return a docstring's sections by name, with the text before them as ``""`` in one line."""
    text = (ast.get_docstring(node) or "") + "\n"
    first = re.sub(r"^Source:.*", "", _SECTION.sub("", text), flags=re.MULTILINE | re.DOTALL)
    return {"": _plain(first), **dict(_SECTION.findall(text))}


def _entries(text: str) -> dict[str, str]:
    return {name: _plain(what) for name, what in _ENTRY.findall(text)}


def _plain(text: str) -> str:
    text = re.sub(r":[a-z]+:`~?([^`]+)`", r"``\1``", " ".join(text.split()))
    return re.sub(r"(?<=\. )\d\. ", "", text).replace("``", "`")


def _signature(node: ast.FunctionDef, first: int = 1) -> str:
    """Format the name, the arguments from the first on, and the result."""
    told = ""
    if "property" not in map(ast.unparse, node.decorator_list):
        told = ast.unparse(ast.arguments(**{**vars(node.args), "args": node.args.args[first:]}))
        told = f"({told})"
    return f"`{node.name}{told}` → `{ast.unparse(node.returns or node)}`"


def _what(node: ast.FunctionDef) -> str:
    sections = _sections(node)
    parts = [sections[""]]
    parts += [f"`{name}`: {what}" for name, what in _entries(sections.get("Args", "")).items()]
    parts += [f"Returns: {_plain(sections['Returns'])}"] if "Returns" in sections else []
    raised = ", ".join(f"`{name}`" for name in _entries(sections.get("Raises", "")))
    parts += [f"Raises: {raised}"] if raised else []
    return "<br>".join(parts)


def _default(node: ast.FunctionDef) -> str:
    last = node.body[-1]
    return f"`{ast.unparse(last.value)}`" if isinstance(last, ast.Return) and last.value else ""


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    documented = _entries(_sections(node).get("Args", ""))
    for place, field in enumerate(node.body):
        if not isinstance(field, ast.AnnAssign):
            continue
        name, kind = ast.unparse(field.target), ast.unparse(field.annotation)
        if kind.startswith("ClassVar"):
            kind = "class attribute"
        text = ""
        match node.body[place + 1 : place + 2]:
            case [ast.Expr(ast.Constant(str(text)))]:
                pass
        default = "" if field.value is None else f" = {ast.unparse(field.value)}"
        default = re.sub(r"field\(default_factory=(\w+)\)", r"\1()", default)
        yield f"`{name}`", f"`{kind}{default}`", documented.get(name, _plain(text))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(write({PAGE: page()}))
