"""A progress bar for a terminal; one plain line per step where the output is no terminal."""

from __future__ import annotations

import time
from typing import TextIO

BAR_CELLS = 24
REDRAW_S = 0.1


class Progress:
    """`say` names the step, `advance` and `reach` move the bar towards `total`.

    A context manager: it wipes its line at the end.
    """

    def __init__(self, out: TextIO) -> None:
        self.total = 1
        self._out = out
        self._done = 0
        self._text = ""
        self._drawn_at = 0.0
        self._terminal = out.isatty()

    def say(self, text: str) -> None:
        self._text = text
        if self._terminal:
            self._draw()
        else:
            print(text, file=self._out, flush=True)

    def advance(self) -> None:
        self._done += 1
        if self._terminal and time.monotonic() - self._drawn_at >= REDRAW_S:
            self._draw()

    def reach(self, done: int) -> None:
        """Set the bar to `done`: a step may need fewer advances than expected."""
        self._done = done
        if self._terminal:
            self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        share = min(1.0, self._done / self.total)
        full = round(share * BAR_CELLS)
        self._out.write(f"\r\x1b[2K{'█' * full}{'░' * (BAR_CELLS - full)} {share:4.0%}  {self._text}")
        self._out.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._terminal:
            self._out.write("\r\x1b[2K")
            self._out.flush()
