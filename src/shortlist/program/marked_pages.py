"""Pages that a person writes, with a part between two marks that a command makes anew."""

from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import write_file

END = "<!-- End of what was made. -->"


def begin_mark(command: str) -> str:
    return f"<!-- From here to the end mark: made by `{command}`. Edits would be lost. -->"


class MarkedPage:
    """One page; it must be there and hold the marks of the command."""

    def __init__(self, path: Path, command: str) -> None:
        if not path.is_file():
            raise ShortlistError(f"there is no file {path}")
        self.path, self._begin = path, begin_mark(command)
        self._before, begin, rest = path.read_text(encoding="utf-8").partition(self._begin)
        _, end, self._after = rest.partition(END)
        if not begin or not end:
            raise ShortlistError(f"{path} must hold the lines {self._begin} and {END}")

    def rewrite(self, made: str) -> None:
        write_file(self.path, f"{self._before}{self._begin}\n\n{made}\n\n{END}{self._after}".encode())
