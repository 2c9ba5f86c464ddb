"""What the loss needs outside of the model's operators, on top of what a micro-batch holds when its forward has ended.

    model.forward                 | compute_loss               | backward
    layers, head, loss function   | cross-entropy of one's own,| of the loss, then of the model: its first value is
    of the model                  | a reference model's pass,  | asked for here
                                  | metrics over the logits    |
    operators: in the plan        | no operator sees it        |

Nothing of the model is given up before backward has come to its layers, so whatever the loss needs by then comes on top
of all that is held. A trace tells the part that is in the model's forward but in no operator (a head that computes log
probabilities in one go), and, where the model computes no loss, that of a cross-entropy of its logits. The first is at
most what forward and backward are measured to need on top. The second is measured by itself, from the end of the
model's forward to the first value that backward asks for. Both are about the same in every micro-batch of a kind.
"""

from __future__ import annotations

from collections import deque

from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.transients import TransientScaling

_SHARE = 0.005
"""Of the memory limit: what is measured below it is not told from the noise of a process's memory."""
_REMEMBERED = 16
_LEAST_SHARE = 0.25
"""Of a trace: what is measured to be less is taken for an accident."""
_MAX_KINDS = 64
_MAX_KNOWN = 256


class _Kind:
    """One kind of batch."""

    def __init__(self) -> None:
        self._traced = TransientScaling()  # inside of the model's forward, after it
        self._smallest_traced = 2**62
        # (tokens, share of the trace inside of the model, bytes per token beyond the trace after it)
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_REMEMBERED)
        self._known: dict[tuple[int, bool], int] = {}  # what was expected since the last news

    def trace(self, num_tokens: int, inside_bytes: int, after_bytes: int) -> None:
        self._known.clear()
        self._traced.observe(num_tokens, [inside_bytes, after_bytes])
        self._smallest_traced = min(self._smallest_traced, num_tokens)

    def expected_bytes(self, num_tokens: int, is_measured: bool = True) -> int:
        found = self._known.get((num_tokens, is_measured))
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            found = self._known[num_tokens, is_measured] = self._expected_bytes(num_tokens, is_measured)
        return found

    def _expected_bytes(self, num_tokens: int, is_measured: bool) -> int:
        inside_bytes, after_bytes = self._in_trace(num_tokens)
        share, rate = self._learnt() if is_measured and self._recent else (1.0, 0.0)
        return max(round(share * inside_bytes), round(after_bytes + rate * num_tokens), 0)

    def observe(self, num_tokens: int, within_bytes: int, after_bytes: int, is_exact: bool) -> None:
        # A peak that is only known to be at least so high must not push out those that are known.
        if not is_exact and max(within_bytes, after_bytes) <= self.expected_bytes(num_tokens):
            return
        traced_inside_bytes, traced_after_bytes = self._in_trace(num_tokens)
        share = within_bytes / traced_inside_bytes if traced_inside_bytes and is_exact else 1.0
        rate = (after_bytes - traced_after_bytes) / max(num_tokens, 1)
        self._known.clear()
        self._recent.append((num_tokens, min(max(share, _LEAST_SHARE), 1.0), rate))

    def _learnt(self) -> tuple[float, float]:
        """The largest share and rate seen lately, among batches of the size that matters: small ones have mostly
        constant costs."""
        seen = [(share, rate) for num_tokens, share, rate in self._recent if 2 * num_tokens >= self.largest]
        return max(share for share, _ in seen), max(rate for _, rate in seen)

    def _in_trace(self, num_tokens: int) -> tuple[int, int]:
        if self._traced.is_empty:
            return 0, 0
        inside_bytes, after_bytes = self._traced.predict(num_tokens)
        # Of the model's outputs, which are as many as there are tokens; what is inside may have a size of its own.
        return inside_bytes, round(after_bytes * min(num_tokens / self._smallest_traced, 1.0))

    @property
    def largest(self) -> int:
        """Tokens of the largest batch that was measured."""
        return max((num_tokens for num_tokens, *_ in self._recent), default=0)


class LossMemory:
    """Learns it by the kind of batch; it follows the number of tokens."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, bool], _Kind] = {}

    def trace(self, shape: BatchShape, inside_bytes: int, after_bytes: int) -> None:
        """A trace has told what comes on top of all that is held, outside of operators.

        Args:
            inside_bytes: in the model's own forward and backward.
            after_bytes: in a loss that is computed of the model's outputs.
        """
        self._of(shape).trace(shape.num_tokens, inside_bytes, after_bytes)

    def observe(self, shape: BatchShape, within_bytes: int, after_bytes: int, is_exact: bool, limit_bytes: int) -> None:
        """A micro-batch was measured. Both beyond the baseline and what was held at the end of forward:

        Args:
            within_bytes: the most that was in use in forward and backward,
            after_bytes: and between the two.
            is_exact: False: it is known to be at least so much.
            limit_bytes: the memory limit.
        """
        after_bytes = after_bytes if after_bytes >= _SHARE * limit_bytes else 0
        self._of(shape).observe(shape.num_tokens, within_bytes, after_bytes, is_exact)

    def expected_bytes(self, shape: BatchShape) -> int:
        """Bytes that the loss is expected to need on top of what a micro-batch of this shape holds."""
        known = self._kinds.get(_key(shape))
        return 0 if known is None else known.expected_bytes(shape.num_tokens)

    def sure_bytes(self, shape: BatchShape) -> int:
        """The same where it is known well enough to refuse a micro-batch for it: from a trace, or from one as large."""
        known = self._kinds.get(_key(shape))
        if known is None:
            return 0
        return known.expected_bytes(shape.num_tokens, is_measured=shape.num_tokens <= known.largest)

    def _of(self, shape: BatchShape) -> _Kind:
        key = _key(shape)
        if key not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return self._kinds.setdefault(key, _Kind())


def _key(shape: BatchShape) -> tuple[str, bool]:
    return shape.kind, shape.has_padding
