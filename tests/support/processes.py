"""Processes of their own. Importing torch takes seconds, so they are forked from one server that has imported it."""

import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes

# What the test files that start ranks import, and what DDP imports at its first use.
_PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torchmetrics", "hypothesis", "scipy.stats", "pytest"]


def run_ranks(work: Callable[[int, int, Path], None], count: int, folder: Path) -> None:
    """Call ``work(rank, count, folder)`` on each rank of a group; an error on any rank is raised here."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    start_processes(_run_rank, args=(count, folder, work), nprocs=count, start_method="forkserver")


def _run_rank(rank: int, count: int, folder: Path, work: Callable[[int, int, Path], None]) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # by checkpoints of torch 2.8 itself
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store of {count}", rank=rank, world_size=count)
    try:
        work(rank, count, folder)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_as_torchrun(work: Callable[[Path], None], count: int, folder: Path) -> None:
    """Call ``work(folder)`` in processes with the environment that torchrun gives its ranks; errors are raised here."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        port = here.getsockname()[1]
    start_processes(_run_torchrun_rank, args=(count, port, work, folder), nprocs=count, start_method="forkserver")


def _run_torchrun_rank(rank: int, count: int, port: int, work: Callable[[Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    work(folder)


def run_code(code: str) -> None:
    """Run Python code in a process that has imported torch, but nothing of this project."""
    run_process(exec, code, {})


def run_process(work: Callable[..., object], *arguments: Any) -> None:
    """Call a function in a process that has imported torch and started no threads."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(target=work, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0
