"""A rank that fails says which one it is and ends at once, and so do the others.

    with ranks_fail_together():
        train()

What torch's launcher does by itself: when a process ends with an error it stops the others of its machine. That leaves
three gaps, which are closed here. A process that has raised may wait in the destructor of its process group for the
others, and not end. The others notice a broken connection first and bury the reason under errors of their own. And
ranks on other machines, which no launcher stops, wait until their collective times out (half an hour by default).

So: the rank that fails prints its traceback and one line with its name, leaves that line in the store of the process
group, and ends without waiting. A thread of every other rank looks there once a second. A rank that only lost its peers
waits a moment for the one that knows why.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from flex_trainer.errors import EXIT_CODE, UserError, one_line, print_mistake
from flex_trainer.ranks import launched_rank, num_launched

GRACE_SECONDS = 3.0
"""How long a rank that is not to blame waits for the launcher to end it."""
_POLL_SECONDS = 1.0
_STORE_GONE_SECONDS = 60.0
"""How long a rank goes on that can no longer hear of the others."""
_ended = threading.Event()
"""What was to be run has ended by itself."""
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


@contextlib.contextmanager
def ranks_fail_together() -> Iterator[None]:
    """Run what is inside; with several processes, end them all when one of them fails.

    This process then ends here (`os._exit`), with code 2 for a `UserError` and 1 for all else. Alone, nothing is
    changed. To be entered on every rank; `watch` starts looking for the failures of others.
    """
    if num_launched() == 1:
        yield
        return
    _ended.clear()
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            _end(RuntimeError(f"ended with exit code {error.code}"))
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # some of torch's are no Exception
        _end(error)
    _ended.set()


def watch() -> None:
    """Start to look for failures of other ranks. Call it once the process group is there. With one process it does
    nothing."""
    if num_launched() == 1:
        return
    threading.Thread(target=_look_out, args=(_store(),), name="flex-ranks", daemon=True).start()


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


def _end(error: BaseException) -> NoReturn:
    if is_lost_peer(error):
        # The launcher may end this process now, or `_look_out`, which knows why.
        time.sleep(GRACE_SECONDS + 2 * _POLL_SECONDS)
        traceback.print_exception(error)
        _leave(f"{rank_name()} lost another rank: {one_line(error)}", 1)
    if isinstance(error, UserError) and os.environ.get("FLEX_TRACEBACK") != "1":
        print_mistake(one_line(error))  # first: the store may be gone, which takes long to notice
        _tell(f"{rank_name()}: {one_line(error)}")
        _leave("", EXIT_CODE)
    message = f"{rank_name()}: {type(error).__name__}: {one_line(error)}"
    traceback.print_exception(error)
    _tell(message)
    _leave(message, 1)


def _tell(message: str) -> None:
    """Leave the first failure where the other ranks look."""
    import torch

    if not torch.distributed.is_initialized():
        return
    # The one who keeps the store may be gone; this rank ends all the same, and says why.
    with contextlib.suppress(RuntimeError, OSError):
        _store().compare_set(_key(), "", message)


def _look_out(store: Any) -> None:
    while True:
        time.sleep(_POLL_SECONDS)
        try:
            has_failed = store.check([_key()])
            message = store.get(_key()).decode() if has_failed else ""
        except (RuntimeError, OSError):
            # The store is gone with the machine that kept it: the run has ended there, one way or the other.
            if not _ended.wait(_STORE_GONE_SECONDS):
                _leave(f"{rank_name()} ends, since the first machine's process group is gone", 1)
            return
        if has_failed:
            time.sleep(GRACE_SECONDS)
            _leave(f"{rank_name()} ends, since another has failed: {message}", 1)


def _store() -> Any:
    """A connection of its own to the store of the process group, whose connection may be busy with a collective."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone()


def _key() -> str:
    """One for each time that the launcher has started the ranks."""
    return f"flex_trainer/failed_rank/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _leave(message: str, exit_code: int) -> NoReturn:
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
