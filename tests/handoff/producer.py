"""A producer in a process of its own: offers prompts, and prints their parameters."""

from __future__ import annotations

import json
import sys

from tests.handoff.engines import make_engine, prompt


def main() -> None:
    engine, _ = make_engine("P", float(sys.argv[1]))
    for number in range(2):
        engine.add_prefill(prompt(number))
    while True:
        if engine.has_work():
            engine.step()
        for params, _ in engine.offered.values():
            print(json.dumps(params), flush=True)
        engine.offered.clear()
        if not engine.has_work():
            print(json.dumps(dict(engine.view.held_blocks())), flush=True)
            return


if __name__ == "__main__":
    main()
