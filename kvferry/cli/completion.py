"""`kvferry completion`: what a shell needs to complete the words of this command; argcomplete does the work."""

from __future__ import annotations

import argparse
import sys

from kvferry.errors import MissingExtra

SHELLS = ("bash", "zsh", "fish")
LINES = {
    "bash": 'eval "$(kvferry completion bash)"',
    "zsh": 'eval "$(kvferry completion zsh)"',
    "fish": "kvferry completion fish | source",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    starts = {"bash": "~/.bashrc", "zsh": "~/.zshrc, after compinit", "fish": "~/.config/fish/config.fish"}
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(f"{starts[shell] + ':':<29} {LINES[shell]}" for shell in SHELLS)


def run(args: argparse.Namespace) -> int:
    """Print the shell's code; MissingExtra without argcomplete."""
    try:
        import argcomplete
    except ImportError:
        raise MissingExtra("argcomplete is not installed; pip install 'kvferry[completion]'") from None
    print(argcomplete.shellcode(["kvferry"], shell=args.shell))
    return 0


def answer(parser: argparse.ArgumentParser) -> None:
    """Tell the shell that asks, by argcomplete's protocol, what may come next, and end the process."""
    try:
        import argcomplete
    except ImportError:
        sys.exit(1)  # nobody reads a message here
    argcomplete.autocomplete(parser)
