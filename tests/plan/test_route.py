"""Routing: every wanted cell once, from an owner, evenly; names field cases F10–F21."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvferry.errors import IncompatibleError, PlanError
from kvferry.layout.document import Instance
from kvferry.plan.document import pair_programs
from kvferry.plan.route import _meets, check_compatible, route
from tests.plan.build import heads_of, instance


def received(source: Instance, target: Instance, rank: int) -> Counter[tuple[int, str, int]]:
    """(layer, part, head) of everything routed to `rank`; asserts that each sender owns what it is asked for."""
    got: Counter[tuple[int, str, int]] = Counter()
    for step in route(source, target, rank):
        pool = source.worker(step.source).pools[0]
        owned_layers = {b.layer for b in pool.buffers}
        ((start, stop),) = pool.segments("head", 0)
        for layer in step.box.layers:
            assert layer in owned_layers
            for part in step.box.parts:
                for low, high in step.box.axes["head"]:
                    assert start <= low and high <= stop
                    got.update((layer, part, head) for head in range(low, high))
    return got


def wanted(target: Instance, rank: int) -> Counter[tuple[int, str, int]]:
    pool = target.worker(rank).pools[0]
    ((start, stop),) = pool.segments("head", 0)
    return Counter((b.layer, b.part, head) for b in pool.buffers for head in range(start, stop))


@pytest.mark.parametrize("heads", range(1, 9))
def test_f10_to_f16_every_tp_pair(heads: int) -> None:
    """F10, F12–F16: TP 1–16 on both sides, dividing or not, replicated or not: every head once, from an owner."""
    for source_tp in range(1, 17):
        source = instance(tp=source_tp, heads=heads, stages=((0,),))
        for target_tp in range(1, 17):
            target = instance("decode", tp=target_tp, heads=heads, stages=((0,),))
            for rank in range(target_tp):
                assert received(source, target, rank) == wanted(target, rank)


@pytest.mark.parametrize(("heads", "source_tp", "target_tp"), [(1, 8, 8), (2, 8, 16), (4, 8, 16), (1, 4, 8), (1, 8, 2)])
def test_f15_replicas_share_the_work_evenly(heads: int, source_tp: int, target_tp: int) -> None:
    source, target = (instance(tp=tp, heads=heads) for tp in (source_tp, target_tp))
    load: Counter[int] = Counter()
    for rank in range(target_tp):
        load.update(step.source for step in route(source, target, rank))
    assert max(load.values()) == -(-target_tp // source_tp)
    assert len(load) == min(source_tp, target_tp)


def test_another_replica_takes_over_when_one_is_down() -> None:
    source, target = instance(tp=8, heads=4), instance("decode", tp=4, heads=4)
    for rank in range(4):
        usual = {step.source for step in route(source, target, rank)}
        other = {step.source for step in route(source, target, rank, down=frozenset(usual))}
        assert not usual & other
        assert received(source, target, rank) == wanted(target, rank)


def test_nobody_left_is_an_error_that_names_the_cell() -> None:
    source, target = instance(tp=4, heads=4), instance("decode", tp=2, heads=4)
    with pytest.raises(PlanError, match=r"group attn, layer 0, part k, head 2.*target worker 1"):
        route(source, target, 1, down=frozenset({2}))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (((0, 1, 2), (3, 4)), ((0, 1, 2, 3, 4),)),
        (((0, 1, 2, 3, 4),), ((0, 1, 2), (3, 4))),
        (((0,), (1, 2), (3,), (4,)), ((0, 1, 2, 3), (4,))),
        (((0, 2, 4), (1, 3)), ((0, 1, 2), (3, 4))),
    ],
)
def test_f20_stages_by_layer_id_not_by_position(
    ours: tuple[tuple[int, ...], ...], theirs: tuple[tuple[int, ...], ...]
) -> None:
    source = instance(tp=2, stages=ours)
    target = instance("decode", tp=3, heads=4, stages=theirs)
    for worker in target.workers:
        assert received(source, target, worker.rank) == wanted(target, worker.rank)


def test_a_layer_that_nobody_owns_is_refused() -> None:
    source = instance(stages=((0, 1, 2),))
    pool = source.workers[0].pools[0]
    from msgspec.structs import replace

    holey = replace(source, workers=(replace(source.workers[0], pools=(replace(pool, buffers=pool.buffers[:-1]),)),))
    with pytest.raises(PlanError, match="layer 2, part v"):
        route(holey, instance("decode", stages=((0, 1, 2),)), 0)


def test_f37_differences_name_the_field_and_both_values() -> None:
    from msgspec.structs import replace

    source = instance(heads=4)
    group = source.groups[0]
    cases = {
        "groups.attn.dtype": replace(group, dtype="float16"),
        "groups.attn.layers": replace(group, layers=(0, 1, 2)),
        "groups.attn.axes": replace(group, axes={"head": 8, "dim": 4}),
        "groups.attn.constants": replace(group, constants={"k_scale": 0.5}),
        "groups.attn.encoding": replace(group, encoding="mxfp4"),
        "groups.attn.growth": replace(group, growth="state"),
    }
    for field, other in cases.items():
        with pytest.raises(IncompatibleError) as caught:
            check_compatible(source, replace(source, groups=(other,)))
        assert caught.value.field == field
        name = field.rpartition(".")[2]
        assert repr(getattr(group, name)) in str(caught.value)
        assert repr(getattr(other, name)) in str(caught.value)
    with pytest.raises(IncompatibleError, match="model"):
        check_compatible(source, replace(source, model="other"))
    draft = replace(group, name="draft")
    with pytest.raises(IncompatibleError, match=r"groups\.draft"):
        check_compatible(source, replace(source, groups=(group, draft)))
    check_compatible(source, replace(source, groups=(group, replace(draft, optional=True))))


def test_heads_of_covers_all_heads() -> None:
    for tp in range(1, 17):
        assert {head for rank in range(tp) for head in range(*heads_of(8, tp, rank))} == set(range(8))


def test_routes_do_not_depend_on_what_was_routed_before() -> None:
    """The index of owners is kept per instance: another order of axes on the other side must not read a stale one."""
    from msgspec.structs import replace

    source, target = instance(tp=2), instance("decode", tp=4)
    group = target.groups[0]
    turned = replace(target, groups=(replace(group, axes=dict(reversed(group.axes.items()))),))
    for other in (target, turned, target):
        for rank in range(4):
            assert received(source, other, rank) == wanted(other, rank)


def test_work_per_worker_does_not_grow_with_the_number_of_workers() -> None:
    """128 × 128 workers: once the two indexes are made, compiling one worker takes no more memory than at 8 × 8."""
    import tracemalloc

    peaks = []
    for workers in (8, 128):
        source = instance(tp=workers, heads=workers, stages=(tuple(range(8)),))
        target = instance("decode", tp=workers, heads=workers, stages=(tuple(range(8)),))
        for measured in (False, True):
            if measured:
                tracemalloc.start()
            for step in route(source, target, 3):
                pair_programs(source.worker(step.source), target.worker(3), source.groups[0], step.box)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_cycles_meet_where_a_token_passes_both() -> None:
    cycles = [(rank, size, block) for size in range(1, 6) for block in range(1, 5) for rank in range(size)]
    for one, other in itertools.product(cycles, cycles):
        period = one[1] * one[2] * other[1] * other[2]
        both = (t // one[2] % one[1] == one[0] and t // other[2] % other[1] == other[0] for t in range(period))
        assert _meets(one, other) == any(both), (one, other)


def test_long_cycles_without_a_common_period_cost_nothing() -> None:
    assert _meets((0, 100_003, 100_003), (1, 2, 1))
