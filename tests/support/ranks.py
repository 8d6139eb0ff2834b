"""Training on several ranks, forked from a server that has imported the program, which torchrun cannot do."""

import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch
from torch import distributed as dist

from shortlist.program.config import RunConfig
from shortlist.program.training.loop import Interrupted, train
from tests.support.early_ends import StopAfterStep

_SECONDS = 300


def train_on_ranks(
    count: int, config: RunConfig, folder: Path, *, resume: bool = False, stop_after: int | None = None
) -> None:
    """Train on this many ranks; with ``stop_after`` the last of them gets a SIGINT after this step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with socket.socket() as here:
        here.bind(("127.0.0.1", 0))
        port = here.getsockname()[1]
    # The server has the environment of the moment it was started.
    settings = (dict(os.environ), count, port, config, folder, resume, stop_after)
    processes = [context.Process(target=_train, args=(rank, *settings)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_SECONDS)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == [130 if stop_after else 0] * count


def _train(
    rank: int,
    environment: dict[str, str],
    count: int,
    port: int,
    config: RunConfig,
    folder: Path,
    resume: bool,
    stop_after: int | None,
) -> None:
    torch.set_num_threads(1)
    os.environ |= environment
    # As torchrun sets them.
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(number) for name, number in (numbers | {"MASTER_PORT": port}).items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}
    callbacks = [StopAfterStep(stop_after)] if stop_after and rank == count - 1 else []
    try:
        train(config, folder=folder, resume=resume, quiet=True, callbacks=callbacks)
    except Interrupted:
        sys.exit(130)
    finally:
        dist.destroy_process_group()
