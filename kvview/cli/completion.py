"""``kvview completion``: the shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from kvview.cli.output import write_text

_VARIABLE = "_KVVIEW_COMPLETE"  # click's name for it; the command answers when it is set


_HELP = """Print what makes SHELL complete commands and options.

\b
bash: eval "$(kvview completion bash)", in ~/.bashrc
zsh:  eval "$(kvview completion zsh)", in ~/.zshrc
fish: kvview completion fish > ~/.config/fish/completions/kvview.fish
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print click's script for a shell."""
    found = get_completion_class(shell)
    assert found is not None, "click knows the three"
    root = click.get_current_context().find_root().command
    write_text("completion", "-", found(root, {}, "kvview", _VARIABLE).source() + "\n")
