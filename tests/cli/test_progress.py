from __future__ import annotations

import io

from kvferry.cli.progress import BAR_CELLS, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with Progress(out) as progress:
        progress.say("loading")
        progress.advance()
        progress.reach(1)
    assert out.getvalue() == "loading\n"


def test_bar_on_a_terminal_is_wiped_at_the_end() -> None:
    out = Terminal()
    with Progress(out) as progress:
        progress.total = 4
        progress.say("loading")
        progress.reach(1)
        last = out.getvalue().rpartition("\r")[2]
        assert "25%" in last and "loading" in last
        assert last.count("█") == BAR_CELLS // 4
        progress.reach(9)
        assert "100%" in out.getvalue().rpartition("\r")[2]
    assert out.getvalue().endswith("\r\x1b[2K")
