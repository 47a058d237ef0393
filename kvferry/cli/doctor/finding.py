"""What a check finds, and how it is run within its time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvferry.errors import KVFerryError

Level = Literal["green", "yellow", "red"]
EXIT: dict[Level, int] = {"green": 0, "yellow": 1, "red": 2}


@dataclass(frozen=True)
class Finding:
    """One line. `cure` says what to do, empty where nothing has to be done."""

    level: Level
    area: str
    name: str
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Check:
    """`run` is called on a thread of its own and given up after `limit_s`."""

    area: str
    name: str
    run: Callable[[], Sequence[Finding]]
    limit_s: float = 5.0


def run_checks(checks: Iterable[Check]) -> list[Finding]:
    """All findings in the order of the checks, which run side by side."""
    running = [_Running(check) for check in checks]
    return [finding for one in running for finding in one.findings()]


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), key=lambda level: EXIT[level], default="green")


class _Running:
    def __init__(self, check: Check) -> None:
        self._check = check
        self._found: Sequence[Finding] = ()
        self._thread = threading.Thread(target=self._run, name=f"kvferry-doctor-{check.name}", daemon=True)
        self._thread.start()

    def findings(self) -> Sequence[Finding]:
        check = self._check
        self._thread.join(check.limit_s)
        if self._thread.is_alive():
            problem = f"no answer within {check.limit_s:g} s, given up"
            return [Finding("red", check.area, check.name, problem, "see what hangs there, then run doctor again")]
        return self._found

    def _run(self) -> None:
        check = self._check
        try:
            self._found = check.run()
        except KVFerryError as error:
            self._found = [Finding("red", check.area, check.name, str(error), "the error names the place to mend")]
        except Exception as error:  # a check that fails must not hide what the others find
            problem = f"this check failed: {type(error).__name__}: {error}"
            self._found = [Finding("red", check.area, check.name, problem, "report it as a bug of kvferry")]
