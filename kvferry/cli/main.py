"""The `kvferry` command. Each subcommand is a module of this package, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Collection, Sequence

from kvferry import __version__
from kvferry.errors import KVFerryError

COMMANDS = {
    "bench": "measure what planning and moving cost",
    "completion": "print what makes a shell complete this command's words",
    "demo": "move a real model's KV cache between processes and compare the decoded text with a plain run",
    "doctor": "look for what is wrong on this machine, with the registry and with each worker, and say what to do",
    "keys": "make the keys by which the members of a deployment know each other",
    "layout": "write the instance document of a model and an engine, from the model's config.json",
    "metrics": "print the numbers of this host's workers, or serve them to Prometheus",
    "plan": "show who sends what to whom between two instances, or the copies of one request",
    "registry": "serve the registry by which instances find each other",
    "soak": "hurt real processes under random load, and compare every byte",
    "trace": "tell one request's story across all workers, or list what runs and what it waits for",
    "verify": "move patterns between two instances and check every byte, before traffic is let in",
}
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 2 with one line on stderr for anything the user can mend."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _run(arguments)
        if sys.stdout is not None:  # None: started with a closed stdout, so nothing was printed
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # the reader of our output has gone (`kvferry plan … | head`); keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except KVFerryError as error:
        return _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")


def make_parser(wanted: Collection[str]) -> argparse.ArgumentParser:
    """The parser of the command; only the subcommands in `wanted` are imported and know their options."""
    parser = argparse.ArgumentParser(
        prog="kvferry", description="Move the KV cache of a request from a prefill instance to a decode instance."
    )
    parser.add_argument("--version", action="version", version=f"kvferry {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name in wanted:
            module = importlib.import_module(f"kvferry.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _run(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could come next
        completion = importlib.import_module("kvferry.cli.completion")
        words = os.environ.get("COMP_LINE", "").split()
        completion.answer(make_parser(words[1:2]))
    args = make_parser(arguments[:1]).parse_args(arguments)
    code: int = args.run(args)
    return code


def _fail(problem: str) -> int:
    print("kvferry: error:", " ".join(problem.split()), file=sys.stderr)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
