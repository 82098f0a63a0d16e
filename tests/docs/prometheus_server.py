"""A Prometheus server that scrapes this process, and the expressions of docs/metrics.md."""

from __future__ import annotations

import importlib
import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.house.source_tree import ROOT

INTERVAL = "200ms"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/kvview.json").read_text("utf-8"))
_QUESTION = re.compile(r"^\| ([^|]*\?) \| (.*) \|$", re.MULTILINE)


def questions() -> dict[str, str]:
    """The expressions of the page by their questions; ``(2)`` follows that of a second one."""
    found = {}
    for question, cell in _QUESTION.findall((ROOT / "docs/metrics.md").read_text("utf-8")):
        for number, expression in enumerate(re.findall("`([^`]*)`", cell), 1):
            found[question + f" ({number})" * (number > 1)] = expression
    return found


def panels() -> dict[str, str]:
    """The expressions of the dashboard, with every variable at All."""
    return {
        f"{panel['title']} {target['refId']}": re.sub(r"\$\w+", ".*", target["expr"])
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }


def alerts() -> dict[str, str]:
    """The questions whose expression has a comparison."""
    return {each: text for each, text in questions().items() if re.search(" (>|==) ", text)}


def write_rules(path: Path, expressions: dict[str, str]) -> None:
    """Write alerting rules; JSON is YAML."""
    rules = [{"alert": name, "expr": text} for name, text in expressions.items()]
    path.write_text(json.dumps({"groups": [{"name": "kvview", "rules": rules}]}), "utf-8")


class Prometheus:
    """The HTTP API of a server that runs.

    Args:
        url: Of the server.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[Any]:
        """The samples of an expression now."""
        found: list[Any] = self._get("query", query=expression)["result"]
        return found

    def label_values(self, definition: str) -> list[str]:
        """The values of a dashboard's variable, which is ``label_values(SERIES, LABEL)``."""
        [(series, label)] = re.findall(r"label_values\((.*), (\w+)\)", definition)
        values: list[str] = self._get(f"label/{label}/values", **{"match[]": series})
        return values

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        return {
            alert["labels"]["alertname"]
            for alert in self._get("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def scrape(self, times: int = 3) -> None:
        """Wait for some scrapes more, and for the rules that follow them."""
        end = self._num_scrapes() + times
        for _ in range(600):
            if self._num_scrapes() >= end:
                return
            time.sleep(0.05)
        raise AssertionError("the server does not scrape")

    def _num_scrapes(self) -> int:
        result = self.query("sum_over_time(up[1h])")
        return int(result[0]["value"][1]) if result else 0

    def _get(self, path: str, **arguments: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]


class _Metrics(BaseHTTPRequestHandler):
    """The registry in the text format, as vLLM's ``/metrics`` has it for every client.

    An exporter of ``prometheus_client`` would offer OpenMetrics too, in which its 0.26 changes
    the colon of a name.
    """

    def do_GET(self) -> None:
        client: Any = importlib.import_module("prometheus_client")
        content = client.generate_latest(client.REGISTRY)
        self.send_response(200)
        self.send_header("content-type", client.CONTENT_TYPE_LATEST)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def export() -> Iterator[int]:
    """Serve the registry of this process on a port of loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metrics) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serve(folder: Path, target_port: int, rules: Sequence[Path]) -> Iterator[Prometheus]:
    """Start a server that scrapes a port of this machine; it listens on loopback alone."""
    config = {
        "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [*map(str, rules)],
        "scrape_configs": [
            {"job_name": "kvview", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config), "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *("prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _wait(f"http://127.0.0.1:{port}/-/ready", process)
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.kill()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except OSError:
            assert process.poll() is None, "prometheus does not start"
            time.sleep(0.05)
        else:
            return
    raise AssertionError("prometheus is not ready")
