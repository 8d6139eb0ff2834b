"""Which runs are compared, and what happens if files are missing or damaged."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortlist.errors import ShortlistError
from shortlist.program.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from shortlist.program.losses import FocalConfig, NoisedTopKHingeConfig
from shortlist.program.report.gather import gather
from shortlist.program.report.names import short_labels
from shortlist.program.report.page import data_name, write_report
from shortlist.program.runs.folder import RunFolder
from tests.support.report_pages import Node, page_of, rows_of
from tests.support.run_folders import World, make_run


def test_labels_tell_set_ups_apart() -> None:
    configs = [
        RunConfig(loss=loss, optim=OptimConfig(lr=lr), recipe=recipe)
        for loss in (FocalConfig(gamma=1), FocalConfig(), NoisedTopKHingeConfig(epsilon=0.1), NoisedTopKHingeConfig())
        for lr in (0.1, 1.0)
        for recipe in ("one", "two")
    ]
    assert len(set(short_labels(configs))) == len(configs)
    assert short_labels([configs[0], configs[8]]) == ["Focal", "Noised top-K hinge"]
    assert short_labels([configs[8], configs[10]])[1] == "Noised top-K hinge (optim.lr = 1)"
    assert short_labels([configs[8], configs[15]])[1] == "Noised top-K hinge (ε = 0.2)"  # which is enough


def test_runs_on_different_data_are_kept_apart(world: World, runs: list[RunFolder], tmp_path: Path) -> None:
    embedded = replace(world, picture=None, data=DataConfig(name="embeddings", root="/data/birds.npz"))
    noisy = replace(world, data=DataConfig(label_noise=0.1))
    made = [
        make_run(tmp_path / "embedded", embedded, "focal", epochs=2),
        make_run(tmp_path / "noisy", noisy, "cross_entropy", epochs=2),
        make_run(tmp_path / "elsewhere", replace(world, data=DataConfig(root="/mnt", workers=9)), "focal", epochs=2),
    ]
    page = page_of([runs[0], *made], tmp_path)
    assert page.all("h1")[0].text == "Runs on glyphs and birds.npz"
    assert [heading.text for heading in page.all("h2")] == [
        "glyphs: two losses",
        "birds.npz: Focal",
        "glyphs: Cross-entropy",
    ]
    sections = page.all("main")[0].children
    assert all(isinstance(section, Node) for section in sections)
    assert [len(section.all("img")) > 0 for section in sections if isinstance(section, Node)] == [True, False, True]
    titles = [[head.text for head in section.all("h3")] for section in sections if isinstance(section, Node)]
    assert "Examples" in titles[0]
    assert "Examples" not in titles[1]
    assert "Most confused classes" in titles[1]


def test_data_of_one_kind_and_size_with_other_test_images_is_other_data(world: World, tmp_path: Path) -> None:
    made: list[RunFolder] = []
    day = {"test_digest": "one"}
    # From an early version, or deleted or edited by hand.
    unknown: list[Any] = [{"train_digest": "one"}, {}, ["odd"]]
    for name, facts in (
        ("day", day),
        ("as small", day),
        ("night", {"test_digest": "other"}),
        *(("day", u) for u in unknown),
    ):
        there = replace(world, picture=None, data=DataConfig(name="folder", root=f"/photos/{name}"))
        made.append(make_run(tmp_path / str(len(made)), there, "focal", len(made) // 2, epochs=2))
        made[-1].write_json("facts.json", facts)
    days, nights = gather(made)
    assert data_name(nights.data) == "night"
    assert [run.folder for run in nights.runs] == [made[2]]
    # Files of the same names may be other pictures, so the folders are listed separately.
    assert [(setup.label, len(setup.finished)) for setup in days.setups] == [
        ("Focal (data.root = /photos/day)", 3),
        ("Focal (data.root = /photos/as small)", 1),
    ]


def test_embeddings_of_several_kinds_are_compared(world: World, tmp_path: Path) -> None:
    made = []
    for name in ("dino.npz", "clip.npz"):
        there = replace(world, picture=None, data=DataConfig(name="embeddings", root=name))
        made.append(make_run(tmp_path / name, there, "focal", epochs=2))
        made[-1].write_json("facts.json", {"train_digest": name})
    (comparison,) = gather(made)
    assert [setup.label for setup in comparison.setups] == [
        "Focal (data.root = dino.npz)",
        "Focal (data.root = clip.npz)",
    ]


def test_where_and_how_data_is_read_makes_no_other_set_up(world: World, tmp_path: Path) -> None:
    here = replace(world, picture=None)
    elsewhere = replace(here, data=DataConfig(root="/mnt", workers=9, on_bad_image="skip"))
    train = TrainConfig(epochs=2, device="cuda", eval_batch_size=7)
    made = [
        make_run(tmp_path / "0", here, "focal", epochs=2),
        make_run(tmp_path / "1", elsewhere, "focal", 1, train=train),
        make_run(tmp_path / "2", elsewhere, "focal", 2, epochs=3),
    ]
    (comparison,) = gather(made)
    assert [(setup.label, len(setup.finished)) for setup in comparison.setups] == [
        ("Focal (train.epochs = 2)", 2),
        ("Focal (train.epochs = 3)", 1),
    ]


def test_notes_that_are_missing_or_odd_do_not_keep_a_run_from_being_shown(run: RunFolder, tmp_path: Path) -> None:
    notes: list[Any] = [{"started": "2026"}, {"commit": "a" * 40, "resumed": [{"epoch": 3}]}, ["odd"]]
    for content in notes:
        run.write_json("environment.json", content)
        assert "Cross-entropy" in page_of([run], tmp_path).text


def test_a_run_killed_before_its_first_file_is_listed_with_the_others(
    world: World, runs: list[RunFolder], tmp_path: Path
) -> None:
    killed = make_run(tmp_path / "killed", world, "focal", finished=False)
    (killed.path / "classes.json").unlink()
    (killed.path / "environment.json").unlink()
    for order in ([killed, runs[0]], [runs[0], killed]):
        (comparison,) = gather(order)
        assert len(comparison.finished) == len(comparison.setups) - 1 == 1
    assert "unfinished" in page_of([killed], tmp_path).text


def test_a_copy_of_a_run_is_no_second_seed(runs: list[RunFolder], tmp_path: Path) -> None:
    copies = [RunFolder(shutil.copytree(runs[0].path, tmp_path / name)) for name in ("copy", "stopped")]
    (copies[1].path / "final.json").unlink()
    page = page_of([copies[1], runs[0], copies[0]], tmp_path)
    row = rows_of(page)["Cross-entropy"]
    assert row.text.count("±") == 0
    assert row.all("th")[0].text.endswith("1 seed")
    assert "1 finished run; 2 runs left out: same settings and seed as another." in page.text
    states = {line.all("th")[0].text: line.all("td")[1].text for line in page.all("tbody")[-1].all("tr")}
    assert states == {
        str(runs[0].path): "finished",
        str(copies[0].path): "finished, left out",
        str(copies[1].path): "unfinished, left out",
    }
    page = page_of([runs[0], copies[0], runs[1]], tmp_path)
    assert rows_of(page)["Cross-entropy"].all("th")[0].text.endswith("2 seeds")


@pytest.mark.parametrize(
    ("lost", "missing"),
    [
        ("test_predictions.safetensors", {"Accuracy against K", "Most confused classes", "Examples"}),
        ("test_per_class.csv", {"Accuracy against class size"}),
        ("metrics.jsonl", {"Learning curves"}),
        ("pictures", {"Examples"}),
    ],
)
def test_what_a_run_has_lost_is_left_out(
    page: Node, run: RunFolder, tmp_path: Path, lost: str, missing: set[str]
) -> None:
    found = run.path / lost
    shutil.rmtree(found) if found.is_dir() else found.unlink()
    rest = page_of([run], tmp_path)
    assert {head.text for head in page.all("h2")} - {head.text for head in rest.all("h2")} == missing


def test_without_their_names_classes_have_numbers(run: RunFolder, tmp_path: Path) -> None:
    (run.path / "classes.json").unlink()
    assert {node.text for node in page_of([run], tmp_path).all("bdi")} <= {f"class {label}" for label in range(30)}


def test_only_k_in_common_are_compared(world: World, runs: list[RunFolder], tmp_path: Path) -> None:
    other = make_run(tmp_path / "a", world, FocalConfig(k=3), train=TrainConfig(epochs=2, ks=(2, 3)))
    page = page_of([runs[0], other], tmp_path)
    assert [head.text for head in page.all("thead")[0].all("th") if head.text.startswith("top-")] == ["top-3", "top-3"]
    nothing = make_run(tmp_path / "b", world, FocalConfig(k=2), train=TrainConfig(epochs=2, ks=(2,)))
    page = page_of([runs[0], nothing], tmp_path)
    assert [head.text for head in page.all("thead")[0].all("th")] == ["loss", "training", "seconds", "best epoch"]


def test_nothing_to_report_and_damaged_files_are_told(runs: list[RunFolder], tmp_path: Path) -> None:
    with pytest.raises(ShortlistError, match="no run"):
        write_report([], tmp_path)
    for name in ("test_predictions.safetensors", "test_per_class.csv", "final.json", "classes.json"):
        shutil.copytree(runs[0].path, tmp_path / name)
        (tmp_path / name / name).write_bytes(b"\x08\0\0\0\0\0\0\0{")
        with pytest.raises(ShortlistError, match=f"{name} is damaged"):
            write_report([RunFolder(tmp_path / name)], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ShortlistError, match="cannot write"):
        write_report(runs, tmp_path / "file" / "page.html")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("classes.json", b'["a", "b"]', "entries"),
        ("classes.json", b'{"names": ["a", "b"]}', "train_images"),
        ("classes.json", b'{"names": "ab", "train_images": [1, 2]}', "names"),
        ("classes.json", b'{"names": ["a", 2], "train_images": [1, 2]}', "names"),
        ("classes.json", b'{"names": ["a", "b"], "train_images": [1, null]}', "2 whole numbers >= 0"),
        ("classes.json", b'{"names": ["a", "b"], "train_images": [1, true]}', "2 whole numbers >= 0"),
        ("classes.json", b'{"names": ["a", "b"], "train_images": [1, -1]}', "2 whole numbers >= 0"),
        ("classes.json", b'{"names": ["a", "b"], "train_images": [1]}', "2 whole numbers >= 0"),
        ("test_per_class.csv", "class,name,train_images,top1\n0,Fürth,3,1\n".encode("latin-1"), "UTF-8"),
    ],
)
def test_a_file_edited_by_hand_is_named(
    run: RunFolder, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (run.path / name).write_bytes(content)
    with pytest.raises(ShortlistError, match=f"{name} is damaged: .*{message}"):
        write_report([run], tmp_path / "page.html")
