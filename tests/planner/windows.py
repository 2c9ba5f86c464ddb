"""Windows to plan, small enough to try every order, and a second way to say what an order costs."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from flex_trainer.planner.fusion import BACKWARD, RECOVER, SIDES, Order, Side, Stage, Window

MS = 1e-3
_TIMES = st.sampled_from((0, 0, 1, 2, 3, 5))
_EXCHANGES = st.sampled_from((0, 1, 2, 4))


def stage(
    name: str, ms: float, exchange_ms: float = 0, copy_ms: float = 0, held: int = 0, peak: int = 0, bound: int = 0
) -> Stage:
    """A stage in milliseconds."""
    return Stage(name, ms * MS, exchange_ms * MS, copy_ms * MS, held, peak, bound)


def stages(side: Side, num_most: int, highest_bound: int) -> st.SearchStrategy[tuple[Stage, ...]]:
    """Any stages of a class."""
    sign = 1 if side in (Side.FORWARD, Side.RECOVER) else -1
    moves = side in (Side.OFFLOAD, Side.RECOVER)
    one = st.builds(
        stage,
        st.just(side.value),
        _TIMES,
        _EXCHANGES,
        _EXCHANGES if moves else st.just(0),
        st.integers(0, 4).map(lambda size: sign * size),
        st.integers(0, 3),
        st.integers(0, highest_bound) if moves else st.just(0),
    )
    return st.lists(one, max_size=num_most).map(tuple)


@st.composite
def windows(draw: st.DrawFn, num_most: int = 3, num_moves: int = 1) -> Window:
    """Any window with at most so many forward and backward stages, and so many offloads and recoveries."""
    forward = draw(stages(Side.FORWARD, num_most, 0))
    backward = draw(stages(Side.BACKWARD, num_most, 0))
    offloads = draw(stages(Side.OFFLOAD, num_moves, len(forward)))
    recoveries = draw(stages(Side.RECOVER, num_moves, len(backward)))
    return Window(forward, backward, offloads, recoveries, draw(st.integers(0, 10)))


def all_orders(window: Window, done: tuple[int, ...] = (0, 0, 0, 0)) -> Iterator[Order]:
    """Every order that the bounds allow."""
    if sum(done) == window.num_stages:
        yield ()
    for side, one in enumerate(SIDES):
        if window.may_run(side, list(done)):
            further = (*done[:side], done[side] + 1, *done[side + 1 :])
            yield from ((one, *rest) for rest in all_orders(window, further))


def longest_path_ms(window: Window, order: Order) -> float:
    """When an order ends: the longest path through what must come after what."""
    ends: dict[tuple[str, Side, int], float] = {}

    def run(lane: str, side: Side, number: int, ms: float, after: list[tuple[str, Side, int]]) -> None:
        before = [key for key in ends if key[0] == lane][-1:]
        ends[lane, side, number] = max((ends[key] for key in (*after, *before) if key in ends), default=0.0) + ms

    done = dict.fromkeys(SIDES, 0)
    for side in order:
        number = done[side]
        one = window.stages[SIDES.index(side)][number]
        after = [("exchange", side, number - 1)]
        if side is SIDES[BACKWARD]:
            num_needed = max((k + 1 for k, other in enumerate(window.recoveries) if other.bound <= number), default=0)
            after += [("copy", SIDES[RECOVER], k) for k in range(num_needed)]
        if one.copy_seconds:
            # It begins with the stage: where the stage begins is where a stage of no length would end.
            run("compute", side, number, 0.0, after)
            run("copy", side, number, one.copy_seconds / MS, [("compute", side, number)])
            ends["compute", side, number] += one.seconds / MS
        else:
            run("compute", side, number, one.seconds / MS, after)
        if one.exchange_seconds:
            run("exchange", side, number, one.exchange_seconds / MS, [("compute", side, number)])
        done[side] += 1
    return max(ends.values(), default=0.0)


def layers(num_layers: int, exchange: float = 1.0, num_moves: int = 0, is_pipeline: bool = False) -> Window:
    """Forward and backward of a stack of equal MoE layers; each layer that is offloaded and recovered is so once."""
    forward = [
        part
        for layer in range(num_layers)
        for part in (
            stage(f"forward.{layer}.attention", 1.0, 0.8 * exchange, held=3, peak=1),
            stage(f"forward.{layer}.experts", 0.9, 0.8 * exchange, held=2, peak=1),
            stage(f"forward.{layer}.rest", 0.2, 0.4 * exchange, held=1, peak=1),
        )
    ]
    backward = [
        part
        for layer in reversed(range(num_layers))
        for part in (
            stage(f"backward.{layer}.experts", 1.9, 0.9 * exchange, held=-3, peak=2),
            stage(f"backward.{layer}.attention", 2.0, 0.9 * exchange, held=-3, peak=2),
        )
    ]
    offloads = [
        stage(f"offload.{number}", 0.02, 0, 1.0, held=-1, bound=0 if is_pipeline else 3 * (number + 1))
        for number in range(num_moves)
    ]
    recoveries = [
        stage(f"recover.{number}", 0.5, 0, 0.5, held=1, bound=2 * (num_layers if is_pipeline else number))
        for number in range(num_moves)
    ]
    return Window(tuple(forward), tuple(backward), tuple(offloads), tuple(recoveries), 6 * num_layers)
