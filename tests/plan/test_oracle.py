"""Plans of random instances and requests, replayed byte by byte and compared with the oracle.

KVFERRY_EXAMPLES sets how many examples are tried; a slow test goes through 20,000 seeds.
"""

from __future__ import annotations

import copy
import json
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from kvferry.errors import PlanError
from kvferry.layout.document import encode_json
from kvferry.layout.validate import parse_instance, parse_request
from kvferry.plan.document import make_plan
from tests.plan.cases import random_case, spoil
from tests.plan.oracle import may_be_refused_early, replay, truth

EXAMPLES = int(os.environ.get("KVFERRY_EXAMPLES", "1000"))
ANY_SPEED = settings(
    deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
Json = dict[str, Any]
# one half can be shrunk, the other is quick
CHANCE = st.one_of(st.randoms(use_true_random=False), st.integers(0, 2**64 - 1).map(random.Random))


def plan(source: Json, target: Json, request: Json) -> Json:
    """The plan as an outside tool sees it: documents in, a document out."""
    ours, theirs = parse_instance(json.dumps(source)), parse_instance(json.dumps(target))
    wanted = parse_request(json.dumps(request), ours, theirs)
    answer: Json = json.loads(encode_json(make_plan(ours, theirs, wanted)))
    return answer


def judge(source: Json, target: Json, request: Json) -> str:
    """Plan and compare; returns how it ended."""
    expected = truth(source, target, request)
    try:
        answer = plan(source, target, request)
    except PlanError as error:
        assert "worker " in str(error)
        excused = expected.verdict != "yes" or may_be_refused_early(source, target, request)
        assert excused, f"refused, but can be served: {error}"
        return "refused"
    assert expected.verdict != "no", "planned, but can't be served"
    return "moved" if replay(expected, answer) else "nothing wanted"


@pytest.mark.timeout(3600)
@ANY_SPEED
@given(CHANCE)
def test_a_plan_moves_each_wanted_byte_once_and_nothing_else(rnd: random.Random) -> None:
    source, target, request = random_case(rnd)
    note(json.dumps([source, target, request]))
    event(judge(source, target, request))


@pytest.mark.timeout(3600)
@settings(ANY_SPEED, max_examples=max(EXAMPLES // 4, 1))
@given(CHANCE)
def test_a_request_that_cannot_be_served_is_refused_and_no_other(rnd: random.Random) -> None:
    source, target, request = random_case(rnd)
    what = spoil(rnd, source, target, request)
    note(what + json.dumps([source, target, request]))
    event(judge(source, target, request))


def test_random_cases_are_worth_their_name() -> None:
    """Most of them move bytes, so the properties above are not about nothing; and the oracle notices a wrong plan."""
    ends = []
    for seed in range(100):
        source, target, request = random_case(random.Random(seed))
        ends.append(judge(source, target, request))
    assert ends.count("moved") > 70
    assert ends.count("refused") == 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_seeds() -> None:
    for seed in range(max(EXAMPLES, 20_000)):
        rnd = random.Random(seed)
        source, target, request = random_case(rnd)
        if seed % 4 == 3:
            spoil(rnd, source, target, request)
        try:
            judge(source, target, request)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("harm", ["lost", "twice", "shifted", "wrong source", "beside"])
def test_the_oracle_notices_a_wrong_plan(harm: str) -> None:
    source, target, request = two_heads()
    answer = plan(source, target, request)
    assert replay(truth(source, target, request), answer) == 3 * 2 * 2
    transfer = answer["transfers"][0]
    fields = ("source_addresses", "target_addresses", "bytes")
    wrong = copy.deepcopy(answer)
    first = wrong["transfers"][0]
    for field in fields:
        if harm == "lost":
            first[field].pop()
        elif harm == "twice":
            first[field].append(transfer[field][0])
    if harm in ("shifted", "beside"):
        field = "source_addresses" if harm == "shifted" else "target_addresses"
        first[field][0] = hex(int(first[field][0], 16) + 2)
    elif harm == "wrong source":
        first["source"] = 1 - first["source"]
    with pytest.raises(AssertionError):
        replay(truth(source, target, request), wrong)


def two_heads() -> tuple[Json, Json, Json]:
    """Two source ranks with one head each, one target rank with both; three tokens."""
    group = {"name": "attn", "growth": "token", "dtype": "float16", "layers": [0], "parts": ["k"], "axes": {"head": 2}}

    def instance(name: str, shares: list[list[int]]) -> Json:
        workers = []
        for rank, (start, stop) in enumerate(shares):
            count = stop - start
            pool = {
                "group": "attn", "page_tokens": 2, "page_bytes": 4 * count, "owned": {"head": [[start, stop]]},
                "modes": [["token", 2, 2 * count], ["head", count, 2]], "buffers": [[0, "k", 0, 0, 4]],
            }  # fmt: skip
            workers.append(
                {"rank": rank, "regions": [{"base": hex(2**64 - 16 * count), "bytes": 16 * count}], "pools": [pool]}
            )
        return {"format": "kvferry-instance/1", "instance": name, "model": "m", "groups": [group], "workers": workers}

    request = {
        "format": "kvferry-request/1", "groups": {"attn": {"tokens": [1, 4]}},
        "source": {"tables": {"attn": {"pages": [3, 0]}}}, "target": {"tables": {"attn": {"pages": [2, 1]}}},
    }  # fmt: skip
    return instance("p", [[0, 1], [1, 2]]), instance("d", [[0, 2]]), request
