"""A forward beside the backward of another micro-batch: the one takes memory while the other gives it back.

Both at their most at one time would be W = 2 of Algorithm 1, which leaves each of them half. But by the time the
forward holds much, the backward holds little. How little follows from the order in which both run, which is the same
on all ranks. So the forward gets a plan that fits beside what the other one still holds, layer by layer; and the order
never makes it take what the other side has not given back yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flex_trainer.planner.plan import Plan


@dataclass(frozen=True)
class Beside:
    """The micro-batch whose backward runs beside a forward. Bytes of its activations."""

    held_bytes: int
    """When the forward begins."""
    held_by_layer: tuple[int, ...]
    """Most that it still holds while the forward runs layer l, for every l, and at last after the layers."""
    on_top_bytes: int
    """Of its backward, on top of what is held."""
    held_now: Callable[[], int] | None = None
    """What it holds at this moment; None: not counted while its backward runs."""

    @classmethod
    def of(cls, plan: Plan, actual_bytes: int, reached: Sequence[int], held_now: Callable[[], int] | None) -> Beside:
        """
        Args:
            plan: under which its forward ran.
            actual_bytes: held when that had ended.
            reached: for each layer of the other one's forward, and after them: the layer that its backward is in by
                then; the number of layers: in none yet.
            held_now: see the attribute.
        """
        unforeseen_bytes = max(actual_bytes - plan.predicted_bytes, 0)

        def held_in(layer: int) -> int:
            if layer >= len(plan.held_by_layer):
                return actual_bytes
            return min(plan.held_until(layer) + unforeseen_bytes, actual_bytes)

        return cls(actual_bytes, tuple(map(held_in, reached)), plan.on_top_bytes, held_now)

    def most_bytes(self, plan: Plan) -> int:
        """Most that both hold at one time, if the forward runs under `plan`."""
        *in_layers, after = self.held_by_layer
        own = plan.held_by_layer
        at_layers = (own[layer] + held for layer, held in enumerate(in_layers) if layer < len(own))
        return max(plan.predicted_bytes + after, *at_layers, self.held_bytes)

    def most_bytes_from(self, plan: Plan, layer: int) -> int:
        """The same from the forward's `layer` on, with the other side as late as it is now."""
        late_bytes = self.late_bytes(layer)
        now_bytes = self.held_bytes if self.held_now is None else self.held_now()
        at_layers = [*zip(plan.held_by_layer[layer:], self.held_by_layer[layer:-1], strict=False)]
        at_layers.append((plan.predicted_bytes, self.held_by_layer[-1]))
        return max(own + min(other + late_bytes, now_bytes) for own, other in at_layers)

    def late_bytes(self, layer: int) -> int:
        """What it holds now beyond what it should while the forward runs `layer`: its order has other stages than it
        was planned with. 0 where that is not counted."""
        if self.held_now is None:
            return 0
        expected = self.held_by_layer[layer] if 0 <= layer < len(self.held_by_layer) else self.held_bytes
        return max(self.held_now() - expected, 0)


def share_of_both(reached: Sequence[int]) -> float:
    """Most that two micro-batches of equal layers hold together, in what one of them holds: from 1 (one of them is gone
    before the other one begins) to 2 (both hold all).

    Args:
        reached: as for `Beside.of`.
    """
    num_layers = len(reached) - 1
    of_other = (min(layer + 1, num_layers) for layer in reached)
    of_own = (min(layer + 1, num_layers) for layer in range(len(reached)))
    return max((own + other) / num_layers for own, other in zip(of_own, of_other, strict=True))
