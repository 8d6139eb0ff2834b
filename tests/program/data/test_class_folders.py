"""Folders of classes on disk."""

from pathlib import Path

import pytest

from shortlist.errors import ShortlistError
from shortlist.program.data.class_folders import holds_folders, loose_images, natural_order, scan_classes
from tests.support.pictures import put_classes, put_image


def test_images_belong_to_the_outermost_folder_however_deep(tmp_path: Path) -> None:
    put_image(tmp_path / "cat" / "b.png")
    put_image(tmp_path / "cat" / "at home" / "2024" / "a.JPG")
    put_image(tmp_path / "dog" / "c.webp")
    scanned = scan_classes(tmp_path, tmp_path)
    assert scanned.images == {"cat": ["cat/at home/2024/a.JPG", "cat/b.png"], "dog": ["dog/c.webp"]}
    listing = scanned.listing(["dog", "cat"])
    assert dict(zip(listing.files, listing.labels.tolist(), strict=True)) == {
        "cat/at home/2024/a.JPG": 1,
        "cat/b.png": 1,
        "dog/c.webp": 0,
    }


def test_hidden_and_foreign_files_are_no_images(tmp_path: Path) -> None:
    put_classes(tmp_path, {"cat": 1, ".git": 1, "__MACOSX": 1})
    put_image(tmp_path / "cat" / "._0.png")
    put_image(tmp_path / "cat" / ".cache" / "1.png")
    put_image(tmp_path / "loose.png")
    (tmp_path / "README.md").touch()
    (tmp_path / "cat" / "notes.txt").touch()
    (tmp_path / "cat" / "Thumbs.db").touch()
    scanned = scan_classes(tmp_path, tmp_path)
    assert scanned.images == {"cat": ["cat/0.png"]}
    assert sorted(scanned.ignored) == ["cat/Thumbs.db", "cat/notes.txt", "loose.png"]


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    put_classes(tmp_path / "elsewhere", {"cats": 2})
    root = tmp_path / "root"
    put_classes(root, {"dog": 1})
    (root / "cat").symlink_to(tmp_path / "elsewhere" / "cats")
    (root / "dog" / "again").symlink_to(root / "dog")
    (root / "dog" / "one more.png").symlink_to(root / "dog" / "0.png")
    assert scan_classes(root, root).images == {
        "cat": ["cat/0.png", "cat/1.png"],
        "dog": ["dog/0.png", "dog/one more.png"],
    }


def test_classes_without_images_are_named(tmp_path: Path) -> None:
    put_classes(tmp_path, {"cat": 1, "dog": 1})
    (tmp_path / "bird" / "nest").mkdir(parents=True)
    with pytest.raises(ShortlistError, match="1 hold none: bird"):
        scan_classes(tmp_path, tmp_path).require_images()


@pytest.mark.parametrize("counts", [{}, {"cat": 3}])
def test_one_class_is_not_enough(tmp_path: Path, counts: dict[str, int]) -> None:
    put_classes(tmp_path, counts)
    with pytest.raises(ShortlistError, match=rf"at least two classes, got {len(counts)}"):
        scan_classes(tmp_path, tmp_path).require_images()


def test_a_class_that_training_lacks_is_named(tmp_path: Path) -> None:
    put_classes(tmp_path, {"cat": 1, "yeti": 1})
    with pytest.raises(ShortlistError, match="1 have none: yeti"):
        scan_classes(tmp_path, tmp_path).listing(["cat", "dog"])


def test_folders_of_folders_are_told_from_folders_of_images(tmp_path: Path) -> None:
    put_classes(tmp_path / "split", {"cat": 1})
    (tmp_path / "split" / "README").touch()
    assert holds_folders(tmp_path / "split")
    assert not holds_folders(tmp_path / "split" / "cat")
    put_classes(tmp_path / "split", {"tail.png": 1})  # a class
    assert loose_images(tmp_path / "split") == []
    put_image(tmp_path / "split" / "overview.png")
    assert loose_images(tmp_path / "split") == ["overview.png"]


def test_numbers_sort_by_value() -> None:
    names = ["c10", "c9", "C9b", "10", "9", "c", "c9.5"]
    assert sorted(names, key=natural_order) == ["9", "10", "c", "c9", "c9.5", "C9b", "c10"]
