"""For MkDocs: the page of all commands, made from the command line's own parsers whenever the pages are built."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from kvferry.cli import main as cli

PAGE = "reference/cli.md"
INTRODUCTION = """# Command line

Everything is a subcommand of `kvferry`. Where a command has `--json`, scripts should read that; tables may change.

| exit code | means |
|---|---|
| 0 | done |
| 1 | the command has done its work, and what it looked at is not as it should be |
| 2 | wrong usage or input, or something that it needs is not there: one line on standard error says what to do |
| 130 | ended by Ctrl-C |
| 141 | the reader of its output has gone, as in `kvferry plan … | head` |

Tab completes commands, options and files, once the shell knows how: see [`kvferry completion`](#kvferry-completion).
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, PAGE, content=cli_page()))
    return files


def cli_page() -> str:
    return "\n".join([INTRODUCTION, *_sections(cli.make_parser(cli.COMMANDS))])


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if parser.prog != "kvferry":
        yield f"{'#' * (1 + parser.prog.count(' '))} {parser.prog}\n"
        yield _section(parser)
    for action in below:
        for choice in action._choices_actions:
            command = action.choices[choice.dest]
            command.description = command.description or f"{(choice.help or '')[:1].upper()}{(choice.help or '')[1:]}."
            yield from _sections(command)


def _section(parser: argparse.ArgumentParser) -> str:
    formatter = parser._get_formatter()
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    usage = "\n".join(
        textwrap.wrap(usage, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    )
    lines = [_prose(parser.description or ""), "", "```text", usage, "```", ""]
    rows = []
    for action in parser._actions:
        if action.help is argparse.SUPPRESS or isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        invocation = formatter._format_action_invocation(action)
        rows.append(
            f"| `{_cell(invocation)}` | {_cell(_prose(formatter._expand_help(action) if action.help else ''))} |"
        )
    if rows:
        lines += ["| option | |", "|---|---|", *rows, ""]
    if parser.epilog:
        lines += ["```text", parser.epilog, "```", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _prose(text: str) -> str:
    """Names of options and files stand as code, and nothing else is Markdown."""
    escaped = re.sub(r"([<>*_\[\]])", r"\\\1", text)
    return re.sub(r"(?<![\w`])(--[a-z][a-z-]*)", r"`\1`", escaped)
