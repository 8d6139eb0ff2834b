"""The built-in data: what is in it, and its cache."""

import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shortlist.program.config import DataConfig
from shortlist.program.data.base import LabelNoise, Problem
from shortlist.program.data.catalogue import load_problem
from shortlist.program.data.in_memory import TensorSplit
from shortlist.program.data.sets import glyphs
from shortlist.program.data.sets.glyph_scripts import Character, characters, fonts_with
from tests.support.forked import run_forked


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set that is quick to draw."""
    monkeypatch.setattr(glyphs, "TRAIN_IMAGES_A_CLASS", 2)
    monkeypatch.setattr(glyphs, "HELD_OUT_IMAGES_A_CLASS", 1)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return load_problem(DataConfig(root=str(tmp_path_factory.mktemp("glyphs")), imbalance=50))


def images(problem: Problem, split: str) -> torch.Tensor:
    found = problem.split(split)
    assert isinstance(found, TensorSplit)
    return found.inputs


def named(name: str) -> str:
    return unicodedata.lookup(name)


def test_a_few_hundred_classes_with_readable_names(demo: Problem) -> None:
    assert 300 <= len(demo.classes) <= 400
    assert len(set(demo.classes)) == len(demo.classes)
    assert f"GREEK SMALL LETTER ALPHA {named('GREEK SMALL LETTER ALPHA')}" in demo.classes


def test_scripts_are_the_superclasses(demo: Problem) -> None:
    assert len(demo.superclasses) == len(demo.classes)
    assert {"Latin", "Greek", "Cyrillic", "Armenian", "Georgian", "Mathematical"} <= set(demo.superclasses)
    assert min(Counter(demo.superclasses).values()) > 10
    for name, script in zip(demo.classes, demo.superclasses, strict=True):
        if script in ("Latin", "Greek", "Cyrillic", "Armenian", "Georgian"):
            assert name.startswith(script.upper())


def test_training_is_long_tailed_and_the_rest_balanced(demo: Problem) -> None:
    counts = demo.class_counts
    assert 15_000 < len(demo.train) < 20_000
    assert 190 < int(counts.max()) < 210
    assert 3 <= int(counts.min()) <= 4
    for split in (demo.val, demo.test):
        assert set(torch.bincount(split.labels).tolist()) == {12}


def test_class_size_has_nothing_to_do_with_script(demo: Problem) -> None:
    scripts = sorted(set(demo.superclasses))
    of_class = torch.tensor([scripts.index(script) for script in demo.superclasses])
    log_counts = demo.class_counts.double().log()
    for script in range(len(scripts)):
        inside = log_counts[of_class == script]
        # five standard errors of a mean
        assert abs(inside.mean() - log_counts.mean()) < 5 * log_counts.std() / len(inside) ** 0.5


def test_the_total_does_not_depend_on_the_imbalance() -> None:
    num_classes = len(characters())
    for config in (DataConfig(), DataConfig(imbalance=10), DataConfig(imbalance=100, imbalance_kind="step")):
        sizes = glyphs.training_sizes(config, num_classes)
        assert int(sizes.sum()) == pytest.approx(50 * num_classes, rel=0.02)
        assert float(sizes.max() / sizes.min()) == pytest.approx(config.imbalance, rel=0.35)


def test_pictures_are_dark_on_light_inside_the_frame_and_all_different(demo: Problem) -> None:
    pictures = images(demo, "train").float()
    assert pictures.shape[1:] == demo.input_shape == (1, 28, 28)
    darkest, lightest = pictures.flatten(1).amin(1), pictures.flatten(1).amax(1)
    assert bool((lightest - darkest > 60).all())
    frame = torch.cat((pictures[:, 0, [0, 27]].flatten(1), pictures[:, 0, :, [0, 27]].flatten(1)), 1).mean(1)
    assert float(frame.mean()) > float(pictures.mean()) + 15  # ink stays away from the edges
    assert len(pictures.unique(dim=0)) == len(pictures)
    normalised = next(demo.test.batches([torch.arange(len(demo.test))], torch.device("cpu")))[0]
    assert abs(float(normalised.mean())) < 0.1
    assert float(normalised.std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "alike",
    [
        ("LATIN CAPITAL LETTER A", "GREEK CAPITAL LETTER ALPHA", "CYRILLIC CAPITAL LETTER A"),
        ("LATIN SMALL LETTER O", "GREEK SMALL LETTER OMICRON", "CYRILLIC SMALL LETTER O"),
        ("LATIN CAPITAL LETTER X", "CYRILLIC CAPITAL LETTER HA", "ROMAN NUMERAL TEN"),
        ("LATIN SMALL LETTER N", "ARMENIAN SMALL LETTER VO"),
    ],
)
def test_look_alikes_are_the_same_drawing_to_the_pixel(alike: tuple[str, ...]) -> None:
    found = [next(character for character in characters() if character.text == named(name)) for name in alike]
    sans = next(path for path in fonts_with(found[0]) if path.stem == "DejaVuSans")
    first, *others = (glyphs._stencil(character, sans) for character in found)
    assert first.max() > 200
    for other in others:
        assert (first == other).all()


def test_more_than_a_quarter_of_the_classes_cannot_be_told_from_another_one() -> None:
    drawn: dict[bytes, list[Character]] = {}
    for character in characters():
        stencil = glyphs._stencil(character, fonts_with(character)[0])
        drawn.setdefault(stencil.tobytes(), []).append(character)
    alike = [group for group in drawn.values() if len(group) > 1]
    assert sum(map(len, alike)) > len(characters()) / 4
    assert max(map(len, alike)) <= 5  # so that five suggestions can hold them all


def test_look_alikes_share_most_of_their_fonts() -> None:
    # A font with only one of them would give it away.
    latin, greek, cyrillic = (
        next(character for character in characters() if character.text == named(f"{script} CAPITAL LETTER {letter}"))
        for script, letter in (("LATIN", "A"), ("GREEK", "ALPHA"), ("CYRILLIC", "A"))
    )
    assert fonts_with(latin) == fonts_with(greek) == fonts_with(cyrillic)
    assert min(len(fonts_with(character)) for character in characters()) >= 4


@pytest.mark.usefixtures("few_images")
def test_the_seed_decides_and_the_cache_changes_nothing(tmp_path: Path) -> None:
    config = DataConfig(root=str(tmp_path / "a"), imbalance=3)
    drawn, cached = load_problem(config), load_problem(config)
    elsewhere = load_problem(DataConfig(root=str(tmp_path / "b"), imbalance=3))
    other_seed = load_problem(DataConfig(root=str(tmp_path / "a"), imbalance=3, seed=1))
    for split in ("train", "val", "test"):
        assert torch.equal(images(drawn, split), images(cached, split))
        assert torch.equal(images(drawn, split), images(elsewhere, split))
        assert torch.equal(drawn.split(split).labels, cached.split(split).labels)
    assert not torch.equal(images(drawn, "val"), images(other_seed, "val"))
    assert not torch.equal(drawn.class_counts, other_seed.class_counts)


@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize("damage", ["truncated", "one bit", "wrong header", "wrong shape", "empty", "another file"])
def test_a_damaged_cache_is_drawn_again(tmp_path: Path, damage: str) -> None:
    config = DataConfig(root=str(tmp_path))
    before = images(load_problem(config), "train")
    (path,) = (tmp_path / "glyphs").iterdir()
    content = path.read_bytes()
    middle = len(content) // 3
    damaged = {
        "truncated": content[:-50_000],
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "wrong header": content[:8] + b"\x63" + content[9:],
        "wrong shape": content.replace(b"'shape': (746, 1", b"'shape': (742, 1", 1),
        "empty": b"",
        "another file": b"hello",
    }
    assert damaged[damage] != content
    path.write_bytes(damaged[damage])
    assert torch.equal(images(load_problem(config), "train"), before)
    with path.open("rb") as file:
        assert file.read(2) == b"PK"  # it is whole again
    assert torch.equal(images(load_problem(config), "train"), before)


@pytest.mark.usefixtures("few_images")
def test_a_folder_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "glyphs").write_text("in the way")
    problem = load_problem(DataConfig(root=str(tmp_path)))
    assert len(problem.train) == 2 * len(problem.classes)
    assert "glyphs" in problem.facts.remarks["glyphs_not_cached"]


@pytest.mark.usefixtures("few_images")
def test_two_processes_may_draw_at_once(tmp_path: Path) -> None:
    def draw() -> None:
        torch.set_num_threads(1)  # the others do not survive a fork
        print(int(images(load_problem(DataConfig(root=str(tmp_path))), "train").long().sum()))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: run_forked(draw, seconds=60), range(2))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.out == second.out != ""
    assert len(list((tmp_path / "glyphs").iterdir())) == 1


@pytest.mark.usefixtures("few_images")
def test_noise_and_augmentation_touch_training_only(tmp_path: Path) -> None:
    root = str(tmp_path)
    plain = load_problem(DataConfig(root=root, augment="none"))
    altered = load_problem(DataConfig(root=root, label_noise=1))
    scripts = plain.superclasses
    before, after = plain.train.labels.tolist(), altered.train.labels.tolist()
    assert before != after
    assert [scripts[label] for label in before] == [scripts[label] for label in after]
    wrong = sum(a != b for a, b in zip(before, after, strict=True))
    assert altered.facts.label_noise == LabelNoise(changed=wrong, of=len(before))
    assert torch.equal(plain.val.labels, altered.val.labels)
    cpu, plan = torch.device("cpu"), [torch.arange(20)]
    assert torch.equal(next(plain.train.batches(plan, cpu, 1))[0], next(plain.train.batches(plan, cpu))[0])
    assert not torch.equal(next(altered.train.batches(plan, cpu, 1))[0], next(altered.train.batches(plan, cpu))[0])
    assert torch.equal(next(altered.val.batches(plan, cpu, 1))[0], next(altered.val.batches(plan, cpu))[0])
