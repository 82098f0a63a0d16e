"""The readers of KV events that are written in Go, built from their sources and compared.

    python tests/events/go_readers.py SOURCES BUILD [CORPUS]

SOURCES has a clone of each repository of :data:`REPOSITORIES`, bare or not, with its name as a
folder (``SOURCES/llm-d-router``). The decoder of each is built at HEAD, unchanged, into
``BUILD/readers`` by the ``go`` of the PATH, without a module proxy. Then each reader decodes every
format of the table, event by event. The exit code is 1 if a profile differs from its reader.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvview.events.formats import WIRE_FORMATS
from kvview.events.wire import Batch, codec, decode, encode
from kvview.testing.events.consumers import Reception, find_consumer
from tests.events.cases import REMOVALS, REMOVED, STORED, STORES

REPOSITORIES = {
    "llm-d-router": "llm-d/llm-d-router",
    "llm-d-kv-cache": "llm-d/llm-d-kv-cache",
    "aibrix": "vllm-project/aibrix",
    "msgpack": "vmihailenco/msgpack",
    "tagparser": "vmihailenco/tagparser",
    "klog": "kubernetes/klog",
    "logr": "go-logr/logr",
}
_LIBRARIES = {
    "msgpack": "github.com/vmihailenco/msgpack/v5",
    "tagparser": "github.com/vmihailenco/tagparser/v2",
    "klog": "k8s.io/klog/v2",
    "logr": "github.com/go-logr/logr",
}
_LLMD = (
    "pkg/kvevents/events.go",
    *(f"pkg/kvevents/engineadapter/{name}.go" for name in ("adapter", "common")),
    *(f"pkg/kvevents/engineadapter/{name}_adapter.go" for name in ("vllm", "sglang")),
)
_AIBRIX = tuple(f"pkg/cache/kvcache/{name}.go" for name in ("event_types", "msgpack_decoder"))
# The first checks of its pool; the rest of that file needs Kubernetes.
_DIGESTIBLE = ("isPrefixIndexableSpecKind", "blockStoredEventDigestible")
_EXPORT = """
// Digestible is the first check of a store by the pool.
func Digestible(event *BlockStoredEvent) (bool, string) { return blockStoredEventDigestible(event) }
"""
_MAIN = Path(__file__).with_name("go_readers.go")


def build(sources: Path, folder: Path) -> dict[str, str]:
    """Build the readers.

    Args:
        sources: Folder of the clones.
        folder: Destination; ``readers`` is the program.

    Returns:
        The commit and its date, by repository.
    """
    heads = {name: _git(sources / name, "log", "-1", "--format=%h %cs") for name in REPOSITORIES}
    modules = {f"lib/{name}": module for name, module in _LIBRARIES.items()}
    for name in _LIBRARIES:
        archive = subprocess.run(
            ["git", f"--git-dir={_git_dir(sources / name)}", "archive", "HEAD"],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        (folder / "lib" / name).mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "x", "-C", folder / "lib" / name], input=archive, check=True)
    for name, files in (("llm-d-router", _LLMD), ("llm-d-kv-cache", _LLMD), ("aibrix", _AIBRIX)):
        module = f"github.com/{REPOSITORIES[name]}"
        modules[name] = module
        for file in files:
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_git(sources / name, "show", f"HEAD:{file}"))
        (folder / name / "go.mod").write_text(f"module {module}\n\ngo 1.21\n")
    pool = _git(sources / "llm-d-router", "show", "HEAD:pkg/kvevents/pool.go")
    functions = [_function(pool, name) for name in _DIGESTIBLE]
    text = "\n".join(["package kvevents\n", *functions, _EXPORT])
    (folder / "llm-d-router/pkg/kvevents/digestible.go").write_text(text)
    (folder / "main.go").write_text(_MAIN.read_text())
    lines = ["module readers", "", "go 1.21", ""]
    lines += [
        f"require {module} v{module[-1] if module[-3:-1] == '/v' else 0}.0.0"
        for module in modules.values()
    ]
    lines += [f"replace {module} => ./{place}" for place, module in modules.items()]
    (folder / "go.mod").write_text("\n".join(lines) + "\n")
    offline = {"GOPROXY": "off", "GOFLAGS": "-mod=mod", "GONOSUMDB": "*", "GOTOOLCHAIN": "local"}
    subprocess.run(
        ["go", "build", "-o", "readers", "."], cwd=folder, check=True, env=os.environ | offline
    )
    return heads


def _git_dir(clone: Path) -> Path:
    return clone / ".git" if (clone / ".git").exists() else clone


def _git(clone: Path, *arguments: str) -> str:
    command = ["git", f"--git-dir={_git_dir(clone)}", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _function(source: str, name: str) -> str:
    start = source.index(f"func {name}(")
    return source[start : source.index("\n}\n", start) + 3]


class Readers:
    """The built program; a context manager."""

    def __init__(self, program: Path) -> None:
        self._process: Any = subprocess.Popen(
            [program.resolve()], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def ask(self, reader: str, payload: bytes) -> dict[str, Any]:
        """Return ``Error``, or the decoded ``Events`` and the reason why each is ``Refused``."""
        question = {"Reader": reader, "Payload": base64.b64encode(payload).decode()}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def batches() -> Iterator[tuple[str, Batch]]:
    """Yield one named event of each kind in each format."""
    for wire_format in WIRE_FORMATS:
        make = codec(wire_format).make
        for tag, ordinary, cases in (
            ("BlockStored", STORED, STORES),
            ("BlockRemoved", REMOVED, REMOVALS),
            ("AllBlocksCleared", {}, {"cleared": {}}),
        ):
            for case, values in cases.items():
                event = make(tag, **ordinary | values)
                yield f"{wire_format.name}, {case}", Batch(1.0, [event], 0, wire_format)
        yield (
            f"{wire_format.name}, no rank",
            Batch(1.0, [make("AllBlocksCleared")], None, wire_format),
        )


def corpus(folder: Path) -> Iterator[tuple[str, Batch]]:
    """Yield the batches of a golden corpus of tests/vllm/make_event_corpus.py."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            yield f"{path.stem}, {row['case']}", decode(base64.b64decode(row["payload"]))


def differences(readers: Readers, named: Iterator[tuple[str, Batch]]) -> Iterator[str]:
    """Yield a line for each difference of a reader and its profile; print how many agree."""
    agreed: Counter[str] = Counter()
    for name, batch in named:
        payload = encode(batch)
        for reader in ("llm-d", "llm-d-arrays", "aibrix"):
            answer = readers.ask(reader, payload)
            said = [one.verdict for one in find_consumer(reader).treat(batch)]
            did = [Reception.BATCH_LOST] * len(said)
            if not answer["Error"]:
                did = [
                    Reception.REJECTED if why else Reception.ACCEPTED
                    for why in answer["Refused"] or ()
                ]
            taken = [Reception.ACCEPTED if one is Reception.PARTLY else one for one in said]
            hangs_on_others = "without its kind" in name and Reception.PARTLY in said
            if taken == did or (
                hangs_on_others and answer["Refused"] == ["unsupported_cache_kind"]
            ):
                agreed[reader] += 1
            else:
                why = answer["Error"] or ", ".join(answer["Refused"])
                shown = [one.text for one in said]
                yield f"{reader}: {name}: the profile has {shown}, the reader {why or 'accepts it'}"
    for reader, number in agreed.items():
        print(f"{reader}: profile and reader agree on {number} batches")


def main() -> None:
    """Build, ask, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("build", type=Path)
    parser.add_argument("corpus", type=Path, nargs="?")
    options = parser.parse_args()
    for name, head in build(options.sources, options.build).items():
        print(f"{REPOSITORIES[name]} at {head.strip()}")
    with Readers(options.build / "readers") as readers:
        found = [*differences(readers, batches())]
        if options.corpus:
            found += differences(readers, corpus(options.corpus))
    print("\n".join(found))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
