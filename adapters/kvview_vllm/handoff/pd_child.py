"""One engine in a separate process, which reads jobs as lines of JSON and prints their results.

``python -m kvview_vllm.handoff.pd_child MODEL CONFIG``, with ``kv_transfer_config`` as JSON.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import traceback
from itertools import count
from pathlib import Path
from typing import Any

from kvview.errors import one_line
from kvview_vllm.inference.server import GARBAGE, Server, fill_kv_caches, prepare

NUM_BLOCKS = 16
_LONGEST = 30.0  # seconds of one job
_PAUSE = 0.005  # seconds between steps without a job


def serve(server: Server, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job: serve a request, or a part of a request.

    Args:
        server: The engine.
        job: Fields of a request: ``ids``, the prompt; ``n``, the number of new tokens; ``id``, if
            the request needs a certain id; ``kv``, its parameters; ``abort_after``, the number of
            steps after which it is aborted. Other jobs: ``steps`` runs steps, ``fill`` overwrites
            the KV cache, and ``forget`` also resets the prefix cache.
    """
    start, name = time.monotonic(), job.get("id", f"r{next(_numbers)}")
    result: dict[str, Any] = {"tokens": None, "kv": None, "error": None}
    if job.get("fill"):
        server.llm.collective_rpc(fill_kv_caches, args=(GARBAGE,))
    if job.get("forget"):
        result["forgot"] = server.forget()
    if "ids" in job:
        server.add(name, job["ids"], job["n"], job.get("kv"))
    left, is_done = job.get("abort_after"), "ids" not in job
    for _ in range(job.get("steps", 0)):
        server.engine.step()
    while not is_done and time.monotonic() < start + _LONGEST:
        if left == 0:
            server.engine.abort_request([name])
            break
        left = None if left is None else left - 1
        for output in server.engine.step():
            if output.finished:
                is_done = True
                result["tokens"] = list(output.outputs[0].token_ids)
                result["kv"] = output.kv_transfer_params
                if output.outputs[0].finish_reason == "error":
                    result["error"] = "the request failed"
    if not is_done and left is None:
        result["hung"] = result["error"] = f"no answer within {_LONGEST:.0f} s"
    result["held"] = server.leaked_blocks()
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


_numbers = count()


def main() -> None:
    """Build the engine, and serve jobs until the input ends."""
    prepare()
    import torch

    torch.set_num_threads(1)
    server = Server(Path(sys.argv[1]), json.loads(sys.argv[2]), NUM_BLOCKS)
    print(json.dumps("up"), flush=True)
    while True:
        try:
            while not select.select([sys.stdin], [], [], _PAUSE)[0]:
                server.engine.step()  # an idle engine steps while its connector has work
            if not (line := sys.stdin.readline()):
                break
            result = serve(server, json.loads(line))
        except Exception as error:  # the engine of a server ends with it
            traceback.print_exc()
            print(json.dumps({"died": one_line(error)}), flush=True)
            os._exit(1)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
