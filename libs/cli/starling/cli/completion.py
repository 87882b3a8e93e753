"""`starling completion`: tab completion of commands, flags and files in bash, zsh and fish."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from starling.cli.command_line import define

ZSH_TAIL = """\
if [ "$funcstack[1]" = "_starling" ]; then
  _cyclopts_starling "$@"
else
  compdef _cyclopts_starling starling
fi"""
"""Lets the script of zsh be sourced after compinit, or be the file `_starling` of $fpath."""
NOTES = """Examples:
  eval "$(starling completion bash)"
  starling completion zsh > ~/.zfunc/_starling
  starling completion fish --install"""


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell.")],
    /,
    *,
    install: Annotated[
        bool,
        Parameter(help="Install the script where the shell looks for completions, and load it in its start-up file."),
    ] = False,
) -> int:
    """Print or install the completion of bash, zsh or fish."""
    from starling.cli.app import make_app

    app = make_app()
    if install:
        print(f"wrote {app.install_completion(shell=shell)}; it is loaded in new shells")
    else:
        print(app.generate_completion(prog_name="starling", shell=shell))
        if shell == "zsh":
            print(ZSH_TAIL)
    return 0


command = define("completion", completion, "bash|zsh|fish [--install]", NOTES)
