"""`kvferry trace`: one request's story across all workers, from endpoints that live and from logs in files."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvferry.cli.tables import bytes_text, seconds_text, table
from kvferry.layout.document import encode_json
from kvferry.observe import files, runtime
from kvferry.observe.reach import Gathered, Silent, ask_all, read_files
from kvferry.observe.records import Log, State, Value, Wait, encode_log, short
from kvferry.observe.story import Event, Side, Story, briefly, find, tell

EXIT_NOT_FOUND = 1
FLOW_COLUMNS = ("worker", "role", "state", "phase", "peer", "pieces", "moved", "of", "under way", "said again")
TIME_COLUMNS = ("seconds", "worker", "event", "peer", "phase", "bytes", "")
LIST_COLUMNS = ("transfer", "request", "worker", "role", "state", "phase", "seconds", "waits for")
HIDDEN = ("request",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST",
        help="the engine's request id, the transfer id, or a part of one; without it, list the transfers that run now",
    )
    parser.add_argument(
        "logs",
        nargs="*",
        type=Path,
        metavar="LOG",
        help=f"logs in files, or folders of them, beside what live endpoints say (default: {files.VARIABLE})",
    )
    parser.add_argument(
        "--run",
        dest="folder",
        type=Path,
        metavar="DIR",
        help=f"folder in which endpoints can be asked (default: {runtime.VARIABLE}, else /tmp/kvferry-UID)",
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="write every live endpoint's log into this folder, too"
    )
    parser.add_argument(
        "--all", action="store_true", help="every record of the timeline; else pieces are told together"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: the stories, or what runs")


def run(args: argparse.Namespace) -> int:
    """0; 1 where REQUEST was not found."""
    live = ask_all(args.folder or runtime.run_folder())
    if args.save is not None:
        _save(live.logs, args.save)
    folder = os.environ.get(files.VARIABLE)
    stored = [Path(folder)] if folder and not args.logs and Path(folder).is_dir() else []
    logs = (*live.logs, *read_files(args.logs or stored))
    if args.request is None:
        return _list(live, args.json)
    stories = [tell(logs, transfer) for transfer in find(logs, args.request)]
    if args.json:
        print(encode_json({"stories": stories, "silent": [vars(one) for one in live.silent]}).decode())
    elif len(stories) == 1:
        print("\n".join(story_lines(stories[0], live.silent, args.all)))
    elif stories:
        print("\n".join(_several(stories)))
    else:
        _nothing(args.request, live, logs)
    return 0 if stories else EXIT_NOT_FOUND


def _save(logs: Iterable[Log], folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for log in logs:
        name = "".join(c if c.isalnum() or c in "-_" else "_" for c in log.head.instance[:100])
        path = folder / f"{name}.{log.head.rank}.{log.head.generation}{files.SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode_log(log))


def _nothing(request: str, live: Gathered, logs: Sequence[Log]) -> None:
    workers = ", ".join(sorted({short(log.head.worker) for log in logs})) or "none"
    print(f"kvferry: no transfer or request is called {request!r}; workers that answered: {workers}", file=sys.stderr)
    for silent in live.silent:
        print(f"kvferry: {silent.worker}: {silent.problem}", file=sys.stderr)


# what runs


def _list(live: Gathered, as_json: bool) -> int:
    running = [(short(log.head.worker), state) for log in live.logs for state in log.states]
    if as_json:
        found = [{"worker": worker, "state": state} for worker, state in running]
        print(encode_json({"running": found, "silent": [vars(one) for one in live.silent]}).decode())
    else:
        rows = [_running_row(worker, state) for worker, state in sorted(running, key=lambda pair: -pair[1].age_s)]
        asked = len(live.logs) + len(live.silent)
        print(table(LIST_COLUMNS, rows) if rows else f"nothing runs; {asked} worker{'s' * (asked != 1)} asked")
        for silent in live.silent:
            print(f"{silent.worker}: {silent.problem}")
    return 0


def _running_row(worker: str, state: State) -> tuple[str, ...]:
    longest = max(state.waits, key=lambda wait: wait.since_s, default=None)
    waits = wait_text(longest) if longest else "-"
    seconds = f"{state.age_s:.1f}"
    return (state.transfer, state.request or "-", worker, state.role, "running", state.phase, seconds, waits)


def _several(stories: Sequence[Story]) -> Iterator[str]:
    rows = [
        (
            story.transfer,
            ", ".join(story.requests) or "-",
            side.worker,
            side.role,
            side.state,
            side.phase,
            f"{side.seconds:.1f}",
        )
        for story in stories
        for side in story.sides
    ]
    yield f"{len(stories)} transfers fit; name one of them:"
    yield ""
    yield table(LIST_COLUMNS[:-1], rows)


# one story


def story_lines(story: Story, silent: Sequence[Silent] = (), everything: bool = False) -> Iterator[str]:
    requests = f"  (request {', '.join(story.requests)})" if story.requests else ""
    yield f"transfer {story.transfer}{requests}"
    yield ""
    yield table(FLOW_COLUMNS, [row for side in story.sides for row in _flow_rows(side)])
    yield ""
    for side in story.sides:
        yield from _side_lines(side)
    peers = {short(flow.peer) for side in story.sides for flow in side.flows}
    for one in silent:
        known = ", which takes part" if one.worker in peers else ""
        yield f"{one.worker}{known}: {one.problem}"
    for clock in story.clocks:
        how = "not known to be equal, and believed" if clock.error_s is None else f"± {seconds_text(clock.error_s)}"
        yield f"the clock of {clock.host} is {clock.ahead_s:+.4f} s ahead, {how}"
    yield ""
    events = story.events if everything else briefly(story.events)
    yield table(TIME_COLUMNS, [_event_row(event) for event in events])


def _flow_rows(side: Side) -> Iterator[tuple[str, ...]]:
    start = (side.worker, side.role, side.state, side.phase)
    for flow in side.flows:
        pieces = f"{flow.moved_pieces}/{flow.pieces}"
        sizes = (bytes_text(flow.moved_bytes), bytes_text(flow.expected_bytes), bytes_text(flow.granted_bytes))
        yield (*start, short(flow.peer), pieces, *sizes, str(side.repeated))
    if not side.flows:
        yield (*start, "-", "-", "-", "-", "-", str(side.repeated))


def _side_lines(side: Side) -> Iterator[str]:
    left = f", {side.left_s:.1f} s left" if side.left_s is not None else ""
    problem = f": {side.problem}" if side.problem else ""
    yield f"{side.worker} ({side.role}) {side.state}, {side.seconds:.3f} s{left}{problem}"
    for wait in side.waits:
        yield f"  {wait_text(wait)}"


def wait_text(wait: Wait) -> str:
    """`waiting 3.1 s for done with 4 pieces from prefill/0, no word from it for 2.9 s`."""
    peer = f" from {short(wait.peer)}" if wait.peer else ""
    quiet = f", no word from it for {wait.quiet_s:.1f} s" if wait.quiet_s is not None and wait.peer else ""
    return f"waiting {wait.since_s:.1f} s for {wait.what}{peer}{quiet}"


def _event_row(event: Event) -> tuple[str, ...]:
    many = f" ×{event.count}" if event.count > 1 else ""
    span = [f"for {seconds_text(event.span_s)}"] if event.span_s >= 0.001 else []
    values = [f"{key} {_value(value)}" for key, value in event.values.items() if key not in HIDDEN]
    size = bytes_text(event.bytes) if event.bytes else ""
    more = ", ".join([*span, *values])
    return (f"{event.at_s:.4f}", event.worker, event.event + many, event.peer, event.phase, size, more)


def _value(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
