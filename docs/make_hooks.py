"""Write ``docs/hooks.md``, which lists every hook with its arguments and results, from the sources.

    python docs/make_hooks.py           # write it
    python docs/make_hooks.py --check   # exit 1 when it is not up to date

Nothing is imported. A hook without a word on when it is called is an error here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
_HEAD = """\
# Hooks, their arguments and results

<!-- Written by docs/make_hooks.py from the sources; edit those and run it again. -->

All names are in `kvview`. Override the hooks that you need; the tables show the default of each.
[The life of a request](life-of-a-request.md) shows the order of the calls, and the laws are
[CONN](laws.md#conn).

- **Options.** Call `kvview.options.parse_options(Options, config.options)` in the `__init__` of
  your connector: `Options` is your pydantic model, with `ConfigDict(extra="forbid")` so that a typo
  is an error. The call returns an `Options`, or raises `ConfigError` with one line for the user.
- **A spec of your own.** The side of a job that is not the GPU may be any object that can be
  pickled and has a string as class attribute `medium`, such as a dataclass with keys, offsets or
  file names. Only your two halves read it.
- **A plan of your own.** A subclass of `StepPlan` may have more fields for the worker half. A plan
  of such a class reaches the worker half in every step.
- **The length of the prompt** is not a field: `num_tokens` is the prompt and the tokens generated
  so far. In the first `match_prefix` of a request it is the length of the prompt. Keep this length
  by `request_id` until `on_request_finished`, because a preempted request is passed to
  `match_prefix` again, with its generated tokens.
- **A hold** (`touch_blocks`, `lease`) may be taken in any hook of the scheduler half, and is
  released when the job is reported. A block that your connector does not want to store does not
  count as skipped (CONN-13).
- **A thread of your own** in the worker half is allowed. `get_finished` takes the results of the
  thread under a lock, `wait` blocks until the given jobs have ended, and `shutdown` joins the
  thread (CONN-12). The thread uses GPU pages only after an event that was recorded in `start_plan`
  has occurred (XFER-6). In the thread, `event.synchronize()` may block.
"""
_TAIL = """
## A medium on disk

- Make the folder an option of your connector, `directory: str | None = None` for example. The user
  passes it with `--option directory=/var/cache/kv`, and None means a temporary folder.
- Each worker process builds its own half from an equal configuration. Every worker receives every
  plan, moves its own part of each page, and reports each job. A job has ended when all workers have
  reported it. So two workers must not share a file.
- `CanonicalKVCaches.rank`, which `register_kv_caches` receives, is the rank of the worker in its
  engine. Use the rank in the name of the file. Two engines have equal ranks, so files in a folder
  that engines share need a further distinction: `tempfile.mkstemp(dir=directory)` returns a name
  that no other process uses. Remove the file in `shutdown`. The table of keys and offsets belongs
  to the scheduler half, and is lost when that half ends.
- For files that must survive a restart, or that several engines share, write a [store below the
  host](tier.md). A store receives the namespace of the model, its weights and its layout, and must
  satisfy its own laws.
- Read and write in a thread, because `start_plan` must not wait. Report a load with `success=False`
  if its bytes may be wrong; the engine then computes the blocks (XFER-4). The check never changes
  the bytes on your medium, so it requires no checksums. If the medium can return bytes that differ
  from the written ones (a disk, a network), keep a checksum of each page, or use a
  [store](tier.md), whose guard keeps checksums.
"""
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):\n((?: {4}.*\n?|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def page() -> str:
    """The whole of ``docs/hooks.md``."""
    lines = [_HEAD]
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
    return "\n".join(lines) + "\n" + _TAIL


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


def main() -> int:
    """Write the page, or only compare it."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("docs/hooks.md is not up to date: python docs/make_hooks.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
