"""Small image files for tests, each of one colour."""

from pathlib import Path

from PIL import Image

Colour = tuple[int, int, int]


def colour_of(number: int) -> Colour:
    """Colours that can still be told apart after JPEG compression."""
    return 40 * (number % 6) + 10, 60 * (number // 6 % 4) + 10, 120


def put_image(path: Path, colour: Colour = (200, 100, 50), size: tuple[int, int] = (40, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def put_classes(folder: Path, counts: dict[str, int], size: tuple[int, int] = (40, 30)) -> None:
    """``folder/<class>/<number>.png`` for each class."""
    for number, (name, count) in enumerate(counts.items()):
        for image in range(count):
            put_image(folder / name / f"{image}.png", colour_of(number), size)
