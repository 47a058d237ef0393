"""The random requests of a soak, and what has become of each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.cli.soak.pool import Shape
from kvferry.cli.soak.worker import Ended, Request

SHAPES = {
    "prefill-a": Shape(tp=2, page_tokens=16, layout="nhd", pages=96),
    "prefill-b": Shape(tp=1, page_tokens=8, layout="hnd", pages=192),
    "decode": Shape(tp=3, page_tokens=12, layout="hnd", pages=256),
}
SOURCES, TARGET = ("prefill-a", "prefill-b"), "decode"
LONGEST = 300
TIMEOUTS_S = (3.0, 8.0)
Part = tuple[str, int]
"""A worker's process: the name of its seat, and the how-manieth process it is there."""


@dataclass
class Running:
    """A request, and how it has ended on each process that takes part; None while it has not."""

    request: Request
    began_s: float
    parts: dict[Part, Ended | None]
    gone: set[Part] = field(default_factory=set)
    abort_s: float | None = None
    aborted: bool = False
    ended_s: float = 0.0

    @property
    def over(self) -> bool:
        return all(part in self.gone or ended is not None for part, ended in self.parts.items())

    def over_for(self, instance: str) -> bool:
        """Whether no process of this instance uses its pages any more."""
        return all(
            part in self.gone or ended is not None
            for part, ended in self.parts.items()
            if part[0].startswith(f"{instance}/")
        )

    @property
    def outcome(self) -> str:
        """ "done" everywhere, or how it ended where it failed; "killed" where no process is left to say."""
        hows = [ended.how for ended in self.parts.values() if ended is not None]
        wrong = [how for how in hows if how != "done"]
        return wrong[0] if wrong else "done" if not self.gone else "killed"

    @property
    def problem(self) -> str:
        return next((ended.problem for ended in self.parts.values() if ended is not None and ended.problem), "")


class Load:
    """Draws requests. Pages are an instance's own, given to one request at a time."""

    def __init__(self, rng: random.Random, shapes: Mapping[str, Shape]) -> None:
        self._rng, self._shapes = rng, shapes
        self._free = {name: list(range(shape.pages)) for name, shape in shapes.items()}
        self._count = 0

    def draw(self, source: str | None = None) -> Request | None:
        """None where an instance has too few pages left. With `source` a plain one, of the longest kind."""
        rng, plain = self._rng, source is not None
        source = source or rng.choice(SOURCES)
        tokens = LONGEST if plain else rng.randint(1, LONGEST)
        hit = rng.randrange(tokens) if not plain and rng.random() < 0.3 else 0
        pages = {}
        for name, count in ((source, tokens), (TARGET, tokens - hit)):
            needed = -(-count // self._shapes[name].page_tokens)
            if needed > len(self._free[name]):
                return None
            pages[name] = needed
        taken = {name: self._take(name, needed) for name, needed in pages.items()}
        self._count += 1
        grows = not plain and tokens > 8 and rng.random() < 0.4
        steps = sorted(rng.sample(range(1, tokens), rng.randint(1, 4))) if grows else []
        return Request(
            id=f"request-{self._count}",
            source=source,
            target=TARGET,
            seed=self._count,
            tokens=tokens,
            hit=hit,
            source_pages=taken[source],
            target_pages=taken[TARGET],
            steps=(*steps, tokens),
            step_s=rng.uniform(0.005, 0.1),
            offer_first=rng.random() < 0.5,
            timeout_s=20.0 if plain else rng.uniform(*TIMEOUTS_S),
        )

    def give_back(self, instance: str, pages: tuple[int, ...]) -> None:
        self._free[instance] += pages

    def pages_held(self) -> int:
        return sum(shape.pages - len(self._free[name]) for name, shape in self._shapes.items())

    def _take(self, instance: str, count: int) -> tuple[int, ...]:
        free = self._free[instance]
        self._rng.shuffle(free)
        taken, self._free[instance] = tuple(free[:count]), free[count:]
        return taken
