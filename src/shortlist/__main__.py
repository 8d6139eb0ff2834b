"""``python -m shortlist`` is the command ``shortlist``; ``torchrun -m shortlist train ...`` starts it on many GPUs."""

import sys


def main() -> None:
    """Start the program, or say what it takes: the library alone needs none of the packages that the program does."""
    try:
        from shortlist.program.cli import main as cli

        cli.main()
    except KeyboardInterrupt:  # while the command line's own packages are imported
        sys.exit(130)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("shortlist"):
            raise
        if missing.name in sys.stdlib_module_names:  # fcntl, on Windows
            sys.exit("shortlist: the program runs on Linux and macOS; the library runs elsewhere too")
        sys.exit(f"shortlist: the program needs {missing.name}: pip install 'shortlist[train]'")


if __name__ == "__main__":
    main()
