"""The picture of a failing run has its requests, jobs and holds, in their steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvview import ConfigError
from kvview.testing.results.law_broken import LawBroken
from kvview.testing.results.timeline import write_timeline

LOG = """\
on_blocks_allocated r1 blocks 1, 2 (0 tokens) (0 tokens)
plan_step r1
step 7 ends; blocks held by connectors: none
on_request_finished r1 blocks 1, 2 (finished)
  touch_blocks blocks 1, 2 my.py:3
  planned job 0: GPU 1 -> CPU <9>
  planned job 1: GPU 2 -> CPU 8
step 8 ends; blocks held by connectors: 1, 2
on_transfers_finished job 0 failed, job 1
  free_blocks blocks 2 my.py:9
step 9 ends; blocks held by connectors: 1"""


def failure() -> LawBroken:
    script, log = "print('a < b')", LOG.splitlines()
    return LawBroken("CONN-4", "held", got="1", expected="0", script=script, log=log)


def rows(page: str) -> dict[str, str]:
    """Return the class and width of each bar and the empty cells on both sides, by name."""
    found = re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", page.partition("</thead>")[2])
    return {name: re.sub(r"<td></td>", ".", cells) for name, cells in found}


def test_bars_are_drawn_from_their_first_to_their_last_step(tmp_path: Path) -> None:
    write_timeline(failure(), str(tmp_path / "t.html"))
    page = (tmp_path / "t.html").read_text()
    assert "print(&#x27;a &lt; b&#x27;)" in page
    assert [*rows(page)] == [
        *("r1", "job 0: GPU 1 -&gt; CPU &lt;9&gt;", "job 1: GPU 2 -&gt; CPU 8"),
        *("block 1: held at my.py:3", "block 2: held at my.py:3"),
    ]
    r1, failed, done, leaked, freed = rows(page).values()
    assert r1 == '<td class="request" colspan="2"></td>.'
    assert failed == '.<td class="job failed" colspan="2">failed</td>'
    assert done == '.<td class="job" colspan="2"></td>'
    assert leaked == '.<td class="block" colspan="2">does not end</td>'
    assert freed == '.<td class="block" colspan="2"></td>'


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--timeline"):
        write_timeline(failure(), str(tmp_path / "no" / "t.html"))
