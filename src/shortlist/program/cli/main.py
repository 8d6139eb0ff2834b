"""The ``shortlist`` command.

Tables and results go to standard output, progress and messages to standard error. A failure exits with 1, a wrong
command line with 2, an interruption with 130.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from shortlist import __version__
from shortlist.errors import ShortlistError
from shortlist.program.cli.add_class import add_class
from shortlist.program.cli.commands import calibrate, datasets, demo, evaluate, predict, report, train, tune
from shortlist.program.cli.compare import compare
from shortlist.program.cli.completion import completion
from shortlist.program.cli.export import export
from shortlist.program.cli.output import say
from shortlist.program.cli.push import push
from shortlist.program.cli.research import bench, reproduce
from shortlist.program.cli.serve import serve
from shortlist.program.text import did_you_mean

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "tune": tune,
    "compare": compare,
    "evaluate": evaluate,
    "calibrate": calibrate,
    "predict": predict,
    "serve": serve,
    "add-class": add_class,
    "export": export,
    "push": push,
    "report": report,
    "reproduce": reproduce,
    "bench": bench,
    "datasets": datasets,
    "demo": demo,
    "completion": completion,
}


def main() -> None:
    """Run the command that the arguments name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may not be valid UTF-8
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    name, *arguments = sys.argv[1:] or ["help"]
    try:
        try:
            _run(name, arguments)
        finally:
            sys.stdout.flush()  # a failure can be handled here, but not while Python exits
        if "TORCHELASTIC_RUN_ID" in os.environ:  # one of torchrun's ranks
            _leave()
    except ShortlistError as error:
        say(f"shortlist {name}: {error}")
        sys.exit(1)
    except BrokenPipeError:  # the reader of the output has closed it, as ``head`` does
        _discard_output()
        sys.exit(1)
    except OSError as error:
        if error.filename is not None:
            say(f"shortlist {name}: cannot use {error.filename}: {error.strerror}")
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):  # the output alone has no file name
            _discard_output()
            say(f"shortlist {name}: cannot write the output: {error.strerror}")
        else:
            raise
        sys.exit(1)
    except RuntimeError as error:
        # A signal handler of torch raises it, wherever the program is at that moment.
        if not str(error).startswith("DataLoader worker"):
            raise
        say(
            f"shortlist {name}: a worker process that reads images was killed, perhaps because memory ran out "
            f"({error}). Use fewer --data.workers; shortlist train --resume continues from the last checkpoint"
        )
        sys.exit(1)
    except KeyboardInterrupt as stopped:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once, without a traceback
        say(f"shortlist {name}: {str(stopped) or 'stopped'}")
        sys.exit(130)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. During an import, exit instead: a package that is half imported fails in odd ways."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _run(name: str, arguments: list[str]) -> None:
    if name == "--version":
        print(f"shortlist {__version__}")
    elif name in ("help", "-h", "--help"):
        if arguments:
            _run(arguments[0], ["--help"])
        else:
            print_help()
    elif name in COMMANDS:
        COMMANDS[name](arguments)
    else:
        known = [*COMMANDS, "help", "--version"]
        hint = did_you_mean(name, known) or f": the commands are {', '.join(known)}"
        say(f"shortlist: there is no command {name!r}{hint}")
        sys.exit(2)


def print_help() -> None:
    """Print the commands, a line for each."""
    print("shortlist: train classifiers whose K suggestions contain the right answer\n")
    for command in COMMANDS.values():
        text, _, usage = (command.__doc__ or "").partition(": ")
        print(f"  {usage:44} {text}")
    print("\nTo start: shortlist demo; then shortlist train folder --data.root YOUR_IMAGES")
    print("shortlist help COMMAND shows the options of a command, shortlist --version the version.")


def _discard_output() -> None:
    """Send the rest of the output to /dev/null: Python would try to write it at its exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave() -> None:
    """End the process at once.

    Threads of its process group may outlive the objects that own them and abort the process while it exits. torchrun
    then kills the other ranks. That was seen in one of ten runs of two ranks on a busy machine.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
