"""How long a source keeps its pages, as a target on another machine may count on it. Pure arithmetic.

The target claims first: it sends its grants, then the source answers how long it goes on. So the source's count begins
later than the target's, whatever the way took, and no two clocks are compared. Each counts on its own clock, of which
it is only known that it runs too fast or too slow by at most `DRIFT`: the target gives up early by that much, the
source late. So the target's end lies before the source's, always.
"""

from __future__ import annotations

DRIFT = 0.001
"""Twice what Linux lets time services slew a clock by, which is 500 in a million; a free quartz is off by less."""


def offered_s(left_s: float) -> float:
    """The lease that an owner who keeps its pages for `left_s` on its own clock may promise now."""
    return max(0.0, left_s) / (1 + DRIFT)


def owner_end_s(granted_s: float, lease_s: float) -> float:
    """When the owner, by its own clock, may take the pages back."""
    return granted_s + lease_s * (1 + DRIFT)


def claimer_end_s(claimed_s: float, lease_s: float) -> float:
    """Until when, by its own clock, the claimer may count on the pages; `claimed_s` is when it sent its claim."""
    return claimed_s + lease_s * (1 - DRIFT)
