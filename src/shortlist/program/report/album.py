"""The pictures that runs on the same data have saved."""

import base64
from dataclasses import dataclass
from pathlib import Path

from shortlist.program.report.gather import Run
from shortlist.program.report.markup import Html, element
from shortlist.program.training.thumbnails import FOLDER

_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST = 1 << 20  # bytes, far more than a picture of the size that runs save


@dataclass(frozen=True)
class _Picture:
    path: Path
    label: int
    first_suggestion: int


class Album:
    """Pictures by the number of the test image and by what a run made of it."""

    def __init__(self, runs: list[Run]) -> None:
        self._pictures: list[_Picture] = []
        self._by_index: dict[int, Path] = {}
        for run in runs:
            for path in _pictures_of(run):
                index = int(path.stem)
                if run.predictions and index < len(run.predictions.labels):
                    self._by_index.setdefault(index, path)
                    label, first = run.predictions.labels[index], run.predictions.suggestions[index, 0]
                    self._pictures.append(_Picture(path, int(label), int(first)))

    def image(self, index: int, name: str) -> Html | None:
        """The test image of this number."""
        return _embedded(self._by_index[index], name) if index in self._by_index else None

    def of_class(self, label: int, suggested: int, name: str) -> Html:
        """An image of the class, if possible one with this first suggestion.

        An empty frame stands for one that is missing among others; where there are no pictures at all, nothing does.
        """
        of_class = [picture for picture in self._pictures if picture.label == label]
        best = sorted(of_class, key=lambda picture: picture.first_suggestion != suggested)
        if best:
            return _embedded(best[0].path, name)
        return element("span", class_="picture") if self._pictures else Html("")


def _pictures_of(run: Run) -> list[Path]:
    """The pictures that the run saved. Through a link any file of the reader's machine would get into the page."""
    folder = run.folder.path / FOLDER
    if folder.is_symlink():
        return []
    return [path for path in sorted(folder.glob("*.png")) if path.stem.isdecimal() and _is_picture(path)]


def _is_picture(path: Path) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
        return False
    with path.open("rb") as file:
        return file.read(len(_PNG)) == _PNG


def _embedded(path: Path, name: str) -> Html:
    content = base64.b64encode(path.read_bytes()).decode()
    return element("img", src=f"data:image/png;base64,{content}", alt=name, class_="picture")
