"""A rank that fails says which one it is and ends at once, and so do the others.

    with ranks_fail_together():
        train()

What torch's launcher does by itself: when a process ends with an error it stops the others of its machine. That leaves
three gaps, which are closed here. A process that has raised may wait in the destructor of its process group for the
others, and not end. The others notice a broken connection first and bury the reason under errors of their own. And
ranks on other machines, which no launcher stops, wait until their collective times out (half an hour by default).

So: the rank that fails prints its traceback and one line with its name, leaves that line in the store of the process
group, wakes the others, and ends without waiting. A thread of every other rank waits there: it asks nothing meanwhile,
however many ranks there are. A rank that only lost its peers waits a moment for the one that knows why.

A clean end is told too. Where the data of one rank ends before that of the others, these lose it in a collective and
fail, and it is the one that ended that must be named.

The thread is stopped and joined before the process goes down: one that comes back from the store while the interpreter
is being taken apart aborts it ("terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

from flex_trainer.errors import EXIT_CODE, UserError, one_line, print_mistake
from flex_trainer.ranks import launched_rank, num_launched

GRACE_SECONDS = 3.0
"""How long a rank that is not to blame waits for the launcher to end it."""
_TELL_SECONDS = 2.0
"""How long the word of a failure may take to a rank that waits for it."""
_WAIT_SECONDS = 20 * 24 * 3600.0
"""How long the thread waits in the store without a word. Each end of a wait prints a warning of torch's."""
_STORE_GONE_SECONDS = 60.0
"""How long a rank goes on that can no longer hear of the others."""
_STOP_SECONDS = 10.0
_FLUSH_SECONDS = 10.0
"""How long what must be written before the end may take."""
_MOST_NAMED = 4
# What gloo, NCCL and torch say when the other side of a connection is gone.
_LOST_PEER_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection was likely closed",
    "remote process exited",
    "ncclremoteerror",
    "communicator was aborted",
    "failed to recv",
)
# What they say when two ranks meet in collectives that are not the same.
_COLLECTIVE_TEXTS = ("gloo", "nccl", "preamble")


@contextlib.contextmanager
def ranks_fail_together() -> Iterator[None]:
    """Run what is inside; with several processes, end them all when one of them fails.

    This process then ends here (`os._exit`), with code 2 for a `UserError` and 1 for all else. Alone, nothing is
    changed. To be entered on every rank; `watch` starts looking for the failures of others.
    """
    if num_launched() == 1:
        yield
        return
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            _end(RuntimeError(f"ended with exit code {error.code}"))
        _finish()
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # some of torch's are no Exception
        _end(error)
    _finish()


def watch() -> None:
    """Wait for failures of other ranks from now on, in a thread. Call it once the process group is there. With one
    process, or where this process waits already, it does nothing."""
    if num_launched() > 1 and _STATE.watcher is None:
        _STATE.watcher = _Watcher()


def tell_end() -> None:
    """Tell the others that what this rank had to do has ended by itself, before a collective that they may not be in.
    Nothing happens where `watch` was not called."""
    watcher = _STATE.watcher
    if watcher is not None and not watcher.has_ended:
        watcher.tell_end()


def flush_at_failure(flush: Callable[[int], None]) -> None:
    """Have `flush(exit_code)` called before this process ends without its own exit: what a tracker holds back, say. It
    may run in another thread than the main one, and has 10 seconds."""
    _STATE.flushes.append(flush)


def rank_name() -> str:
    """For example `rank 1 of 2 on host-a`."""
    return f"rank {launched_rank()} of {num_launched()} on {socket.gethostname()}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error`, or what it came from, says that another rank is gone, and not that something is wrong here."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, RuntimeError) and any(part in text for part in _LOST_PEER_TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class _Watcher:
    """A thread that waits in the store of the process group until another rank has failed.

    Each rank waits for a key of its own, which is set to wake it: by a rank that fails, for all; by itself, to stop.
    """

    def __init__(self) -> None:
        from torch.distributed.distributed_c10d import _get_default_store

        self._store: Any = _get_default_store()  # kept: its server may be in this process
        # A connection of its own: one that waits can do nothing else.
        self._waiting: Any = self._store.clone()
        self.has_ended = False
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="flex-ranks", daemon=True)
        self._thread.start()
        atexit.register(_release_group)
        atexit.register(self.stop)  # registered later, so called earlier

    def tell_end(self) -> None:
        self.has_ended = True
        with contextlib.suppress(RuntimeError, OSError):  # the store may be gone: then no rank can be told
            self._store.set(_key("ended", launched_rank()), rank_name())

    def tell_failure(self, message: str) -> None:
        """Leave the first failure where the others look, and wake them."""
        # The one who keeps the store may be gone; this rank ends all the same, and says why.
        with contextlib.suppress(RuntimeError, OSError):
            self._store.compare_set(_key("failed"), "", message)
            others = [_key("wake", rank) for rank in range(num_launched()) if rank != launched_rank()]
            self._store.multi_set(others, [""] * len(others))
            if launched_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                time.sleep(_TELL_SECONDS)  # this process keeps the store: the others must have read it first

    def ranks_that(self, have_ended: bool) -> list[str]:
        """The other ranks that have told their end, or those that have not."""
        keys = {rank: _key("ended", rank) for rank in range(num_launched()) if rank != launched_rank()}
        found = [rank for rank, key in keys.items() if self._store.check([key]) == have_ended]
        return [self._store.get(keys[rank]).decode() if have_ended else f"rank {rank}" for rank in found]

    def stop(self) -> None:
        """Wake the thread and wait until it is gone; to be called while the interpreter still runs."""
        self._is_stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError, OSError):  # without a store the thread is awake already
                self._store.set(_key("wake", launched_rank()), "")
            self._thread.join(_STOP_SECONDS)
        atexit.unregister(self.stop)

    def _wait(self) -> None:
        own = _key("wake", launched_rank())
        while not self._is_stopped.is_set():
            try:
                self._waiting.wait([own], timedelta(seconds=_WAIT_SECONDS))
                if not self._waiting.check([_key("failed")]):  # woken to stop
                    self._waiting.delete_key(own)
                    continue
                message = self._waiting.get(_key("failed")).decode()
            except (RuntimeError, OSError) as error:
                if _is_timeout(error):
                    continue
                # The store is gone with the machine that kept it: the run has ended there, one way or the other.
                if not self._is_stopped.wait(_STORE_GONE_SECONDS):
                    _leave(f"{rank_name()} ends, since the first machine's process group is gone", 1)
                return
            _flush_in_time(1)  # before the launcher ends this process
            if not self._is_stopped.wait(GRACE_SECONDS):
                _leave(f"{rank_name()} ends, since another has failed: {message}", 1)


def _release_group() -> None:
    """End gloo's threads while the interpreter still runs: one that meets a peer's data while the process goes down can
    abort it. NCCL's own watchdog does without, and would wait for ranks that have ended."""
    from torch import distributed

    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


class _State:
    """What this process has besides: one watcher, and what is to be flushed."""

    def __init__(self) -> None:
        self.watcher: _Watcher | None = None
        self.flushes: list[Callable[[int], None]] = []


_STATE = _State()


def _finish() -> None:
    """A clean end: told, and without a thread that is left behind."""
    tell_end()
    if _STATE.watcher is not None:
        _STATE.watcher.stop()
        _STATE.watcher = None
    _STATE.flushes.clear()


def _end(error: BaseException) -> NoReturn:
    watcher = _STATE.watcher
    if is_lost_peer(error):
        # The launcher may end this process now, or the watcher, which knows why.
        time.sleep(GRACE_SECONDS + _TELL_SECONDS)
        uneven = _uneven_end(watcher)
        message = f"{rank_name()} lost another rank: {one_line(error)}{uneven}"
        traceback.print_exception(error)
        if uneven and watcher is not None:
            watcher.tell_failure(message)
        _leave(message, 1)
    if isinstance(error, UserError) and os.environ.get("FLEX_TRACEBACK") != "1":
        print_mistake(one_line(error))  # first: the store may be gone, which takes long to notice
        if watcher is not None:
            watcher.tell_failure(f"{rank_name()}: {one_line(error)}")
        _leave("", EXIT_CODE)
    uneven = _uneven_end(watcher) if _is_of_collective(error) else ""
    message = f"{rank_name()}: {type(error).__name__}: {one_line(error)}{uneven}"
    traceback.print_exception(error)
    if watcher is not None:
        watcher.tell_failure(message)
    _leave(message, 1)


def _uneven_end(watcher: _Watcher | None) -> str:
    """Which ranks were done when this one was not, or the other way round; empty: that is not what happened."""
    if watcher is None:
        return ""
    try:
        others = watcher.ranks_that(have_ended=not watcher.has_ended)
    except (RuntimeError, OSError):  # the store is gone
        return ""
    if not others:
        return ""
    named = ", ".join(others[:_MOST_NAMED]) + (f" and {len(others) - _MOST_NAMED} more" if others[_MOST_NAMED:] else "")
    what = f"this rank had ended before {named}" if watcher.has_ended else f"{named} had ended before, without an error"
    return f" ({what}: every rank needs the same number of batches)"


def _is_of_collective(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _COLLECTIVE_TEXTS)


def _is_timeout(error: Exception) -> bool:
    import torch

    return isinstance(error, torch.distributed.DistStoreError) or "timeout" in str(error).lower()


def _key(what: str, rank: int | None = None) -> str:
    """One for each time that the launcher has started the ranks."""
    own = "" if rank is None else f"/{rank}"
    return f"flex_trainer/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}{own}"


def _leave(message: str, exit_code: int) -> NoReturn:
    if message:
        print(message, file=sys.stderr)
    _flush_in_time(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _flush_in_time(exit_code: int) -> None:
    # In a thread that may be left behind: what hangs must not keep this process.
    flushing = threading.Thread(target=_flush, args=(exit_code,), daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECONDS)


def _flush(exit_code: int) -> None:
    flushes, _STATE.flushes = _STATE.flushes, []  # not those that are registered while one of these takes long
    while flushes:
        try:
            flushes.pop()(exit_code)
        except Exception:  # the process ends for another reason, which is told
            traceback.print_exc()
    logging.shutdown()
