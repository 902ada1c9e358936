"""Real ranks for tests: forked processes in one gloo group."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Call ``function(rank, *args)`` in `world_size` forked processes joined by gloo; their results, by rank.

    Forked, not spawned: torch is imported already, so 8 ranks start in a fraction of a second, and `function`
    may be any closure. Results must pickle. Raises RuntimeError with the traceback of the first rank that
    fails, and TimeoutError when `timeout` seconds pass; the remaining ranks are killed, and in the latter case
    write first where each of their threads is. The environment is
    torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so code that joins by itself works.

    A fork copies no threads: an OpenMP pool that the parent has used would be waited for forever, so each
    rank begins by asking torch for one thread. Do not fork after a backward pass on a GPU.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=4 * world_size)  # a free port
    port = listener.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(target=_work, args=(function, rank, world_size, args, port, pipe, timeout))
        for rank, (_, pipe) in enumerate(pipes)
    ]
    faulthandler.register(signal.SIGUSR1, file=2)  # the ranks inherit it
    for process in processes:
        process.start()
    # The store's server starts after the forks: its thread looks addresses up, and a child forked at that
    # moment inherits the resolver's lock, taken for ever.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    for _, ours in pipes:
        ours.close()  # so that a rank that dies reads as the end of its pipe
    try:
        results = _collect([theirs for theirs, _ in pipes], time.monotonic() + timeout)
        for process in processes:
            process.join(max(1.0, timeout))
        return results
    except TimeoutError:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.2)  # for it to write before the next one does
        raise
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        del store  # the server lives until here


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(pipes)} did not finish in time")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                succeeded, result = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word") from None
            if not succeeded:
                raise RuntimeError(f"rank {rank} of {len(pipes)} failed:\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _work(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    port: int,
    pipe: Connection,
    timeout: float,
) -> None:
    gc.disable()  # a collection would copy every page that the rank shares with its parent,
    gc.freeze()  # and one that a test asks for looks at the rank's own objects
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent serves the store, as torchrun's agent does
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",  # as torchrun has it; Accelerate asks for as many threads
    )
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        pipe.send_bytes(pickle.dumps((True, function(rank, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while another may still talk to him
        dist.destroy_process_group()
