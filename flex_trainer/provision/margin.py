"""The safety margin: bytes that are not planned for, because an allocation has failed under a plan that used them."""

from __future__ import annotations


class SafetyMargin:
    """Grows at once, shrinks slowly.

    A failure adds the bytes of the failed request, or 3% of the limit where that is more; no more than half of the
    limit is kept back. With every micro-batch that passes, the margin decays: half of it is gone after `half_life` of
    them, 64 at first, so one spike that has nothing to do with this run (another process on the same machine) is
    forgotten. A failure that comes while some margin is still there doubles the half-life, up to 4,096: a cause that
    stays is met ever more rarely.
    """

    SHARE = 0.03
    MOST_SHARE = 0.5
    FORGOTTEN_SHARE = 1 / 512
    FIRST_HALF_LIFE, LONGEST_HALF_LIFE = 64, 4096

    def __init__(self, num_bytes: int = 0) -> None:
        """`num_bytes`: what an earlier run ended with."""
        self._bytes = float(num_bytes)
        self.half_life = self.FIRST_HALF_LIFE
        """Micro-batches after which half of the margin is gone."""

    @property
    def num_bytes(self) -> int:
        """Bytes to keep free."""
        return int(self._bytes)

    def widen(self, requested_bytes: int, limit_bytes: int) -> None:
        """An allocation failed that asked for `requested_bytes` (0: not known)."""
        if self._bytes > 0:
            self.half_life = min(2 * self.half_life, self.LONGEST_HALF_LIFE)
        added = max(requested_bytes, self.SHARE * limit_bytes)
        self._bytes = min(self._bytes + added, self.MOST_SHARE * limit_bytes)

    def relax(self, limit_bytes: int) -> None:
        """A micro-batch has passed."""
        self._bytes *= 0.5 ** (1 / self.half_life)
        if self._bytes < self.FORGOTTEN_SHARE * limit_bytes:
            self._bytes = 0.0
            self.half_life = self.FIRST_HALF_LIFE
