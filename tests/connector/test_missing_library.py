"""A connector that cannot be made because a library is missing names the library in one line."""

from __future__ import annotations

import pytest

from kvview.connector.hook_errors import missing_library


@pytest.mark.parametrize(
    ("code", "needs"),
    [
        ("import no_such_library", "needs no_such_library, which cannot be used; install it in"),
        (
            "from json import no_such_name",
            "needs another version of json; install one that has the name (",
        ),
        ("raise RuntimeError('NIXL is not available')", "needs NIXL, which cannot be used;"),
    ],
)
def test_a_library_that_cannot_be_used_is_named(code: str, needs: str) -> None:
    with pytest.raises((ImportError, RuntimeError)) as raised:
        exec(code)
    error = missing_library(raised.value, "MyConnector")
    assert str(error).startswith(f"MyConnector {needs}")
