"""A failure that ends."""

from __future__ import annotations

from collections.abc import Callable

from flex_trainer.testing.failures import TEXT


class Once:
    """Raises an error the first times it is called."""

    def __init__(self, num_failures: int = 1, make_error: Callable[[], Exception] = lambda: RuntimeError(TEXT)) -> None:
        self.num_left = num_failures
        self._make_error = make_error

    def __call__(self) -> None:
        if self.num_left > 0:
            self.num_left -= 1
            raise self._make_error()
