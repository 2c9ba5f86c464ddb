"""What the tests of `bench ep` run in other processes; importing it is cheap."""

from __future__ import annotations

import os
import socket
import time

from flex_trainer.bench.network import sent_bytes

PORT = 29601


def fail_on_rank_one() -> int:
    """Rank 1 fails; rank 0 would go on for a minute."""
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has had enough")
    time.sleep(60)
    return 0


def sleep_for_a_minute() -> None:
    time.sleep(60)


def send_rows() -> dict[str, int]:
    """2 ranks exchange rows of 3 float32, in four ways; rank r sends 1 + r rows to itself and 5 to the other.

    Returns:
        What was counted of each way.
    """
    import torch
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    from flex_trainer.bench.ep_wire import CountExchanges
    from flex_trainer.experts.pairwise import start_pairwise

    rank = torch.distributed.get_rank()
    sizes = [1, 5] if rank == 0 else [5, 2]
    rows = torch.ones(sum(sizes), 3, requires_grad=True)
    output = torch.empty(sum(sizes), 3)
    group = torch.distributed.group.WORLD
    assert group is not None
    found = {}
    with CountExchanges() as count:
        torch.distributed.all_to_all_single(output, rows.detach(), sizes, sizes)
    found["plain"] = count.num_bytes
    with CountExchanges() as count:
        all_to_all_single_autograd(rows, sizes, sizes, group).sum().backward()
    found["functional, forward and backward"] = count.num_bytes
    with CountExchanges() as count:
        torch.distributed.all_to_all_single(torch.empty(4), torch.ones(4))
    found["even"] = count.num_bytes
    with CountExchanges() as count:
        others = [0, 5] if rank == 0 else [5, 0]
        start_pairwise(output[:5], rows.detach()[:5], others, others, group).wait()
    found["pairwise"] = count.num_bytes
    return found


def receive(address: str) -> None:
    """Take whatever one sender sends; says when it is ready."""
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            while connection.recv(2**16):
                pass


def send(address: str, interface: str, num_bytes: int) -> None:
    """Send so many bytes; prints the seconds until all had arrived, and the bytes that went over the interface."""
    sent, started = sent_bytes(interface), time.perf_counter()
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(b"x" * num_bytes)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # the end: the other side has read everything
    print(time.perf_counter() - started, sent_bytes(interface) - sent)
