"""The model card of a run, ``README.md``: its data, its accuracy, how to use it. Made from the other files."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shortlist.program.config import RunConfig
from shortlist.program.runs.folder import RunFolder
from shortlist.program.runs.records import Added, read_added, read_classes, read_correction, read_facts, read_result
from shortlist.program.text import counted, printable

FILE = "README.md"
_GROUPS = {"micro": "photos", "macro": "classes", "few": "few", "medium": "medium", "many": "many"}
_CITATION = """```bibtex
@inproceedings{garcin2022stochastic,
  title     = {Stochastic smoothing of the top-K calibrated hinge loss for deep imbalanced classification},
  author    = {Garcin, Camille and Servajean, Maximilien and Joly, Alexis and Salmon, Joseph},
  booktitle = {International Conference on Machine Learning},
  pages     = {7208--7222},
  year      = {2022}
}
```"""


def write_card(run: RunFolder, result: Mapping[str, Any] | None = None) -> None:
    """Write the card of a run, or write it anew after something was added to the run.

    ``result`` is what ``final.json`` will hold, if it is not written yet: it must be the last file of a run.
    """
    run.write_file(FILE, card_text(run, result).encode())


def card_text(run: RunFolder, result: Mapping[str, Any] | None = None, *, name: str = "", place: str = "") -> str:
    """The card, for a run that is called by another name, or lies in another place."""
    name, place = _plain(name or run.path.resolve().name), place or "FOLDER"
    added = read_added(run)
    parts = _added(run, added) if added else _trained(run, result or read_result(run))
    title = f"# {name}: {counted(run.config.loss.largest_k, 'suggestion')} among "
    title += counted(len(read_classes(run).names), "class", "classes")
    return "\n\n".join((title, *parts, *_use(run.config, place))) + "\n"


def _added(run: RunFolder, added: Added) -> Iterator[str]:
    """Of a run with classes that were added after training."""
    yield (
        f"A classifier by [shortlist](https://github.com/shortlist-ml/shortlist): {_plain(Path(added.parent).name)} "
        f"(weights `{added.parent_sha256[:16]}`) with more classes. Their weights were learnt in seconds, from a few "
        "photos; all others are as before."
    )
    yield "## New classes"
    new = zip(added.classes, added.photos, strict=True)
    yield "\n".join(f"- {_plain(name)}: {counted(photos, 'photo')}" for name, photos in new)
    yield "## Accuracy"
    yield "Not measured. The test result of the other run is not that of this one."
    yield "## How sure it is"
    yield _calibration(run)


def _trained(run: RunFolder, result: Mapping[str, Any]) -> Iterator[str]:
    config = run.config
    yield f"A classifier by [shortlist](https://github.com/shortlist-ml/shortlist). {_trained_how(run, config)}"
    yield "## Data"
    yield _data(run, config, read_classes(run).train_images)
    yield "## Accuracy on the test images"
    yield _table(config, result)
    yield _remarks(run)
    yield "## How sure it is"
    yield _calibration(run)


def _use(config: RunConfig, place: str) -> Iterator[str]:
    yield "## Use it"
    remark = "  # this one" if place == "FOLDER" else ""
    yield f'```python\nimport shortlist as sl\n\npredictor = sl.load("{place}"){remark}\n{_call(config)}\n```'
    yield f"`shortlist predict {place} {'vectors.npz' if _takes_vectors(config) else 'photo.jpg'}` does the same."
    yield "## Deploy it"
    yield (
        f"`shortlist export {place}` writes `export/model.onnx`, for onnxruntime, and `export/model.pt2`, for torch: "
        f"{'vectors' if _takes_vectors(config) else 'pixels'} in, suggestions out. Neither needs shortlist. "
        "[The guide](https://github.com/shortlist-ml/shortlist/blob/main/docs/how-to/export.md) shows how to run one."
    )
    yield "## Cite"
    yield _CITATION


def _trained_how(run: RunFolder, config: RunConfig) -> str:
    environment = run.read_environment()
    version = environment.get("versions", {}).get("shortlist", "")
    network = "the last layer alone, on embeddings" if _takes_vectors(config) else _plain(config.model.name)
    frozen = ", frozen except for its last layer" if config.model.frozen else ""
    parts = [
        f"Network: {network}{frozen}. Loss: {config.loss.label.lower()}. {counted(config.train.epochs, 'epoch')}, "
        f"seed {config.seed}, recipe {_plain(config.recipe)}.",
        f"Version {_plain(version)}." if version else "",
        f"Trained {_plain(str(environment.get('started', ''))[:10])} on {_plain(str(environment.get('device', '')))}.",
        "All settings are in `config.json`.",
    ]
    return " ".join(part for part in parts if part)


def _data(run: RunFolder, config: RunConfig, train_images: tuple[int, ...]) -> str:
    name = _plain(Path(config.data.root).name) if config.data.is_named_by_root else config.data.name
    tested = run.path / "test_per_class.csv"
    lines = [
        f"- {name}: {counted(sum(train_images), 'training image')}, {min(train_images):,} to {max(train_images):,} "
        f"of each of {counted(len(train_images), 'class', 'classes')}"
        + (f"; {counted(_test_images(tested), 'test image')}." if tested.is_file() else ".")
    ]
    facts = read_facts(run)
    if facts.imbalance is not None:
        lines.append(f"- Thinned to a long tail: {facts.imbalance.kept:,} of {facts.imbalance.of:,} training images.")
    if facts.label_noise is not None:
        lines.append(f"- Wrong labels were added: {facts.label_noise.changed:,} of {facts.label_noise.of:,}.")
    if facts.held_out:
        splits = " and ".join(name.partition("_")[0] for name in facts.held_out)
        lines.append(f"- Held out from the training images: {splits}.")
    return "\n".join(lines)


def _test_images(path: Path) -> int:
    with path.open(newline="", encoding="utf-8") as file:
        return sum(int(line["images"]) for line in csv.DictReader(file))


def _table(config: RunConfig, result: Mapping[str, Any]) -> str:
    """Top-K accuracy in percent, plain and corrected."""
    groups = [group for group in _GROUPS if f"{group}_top{config.all_ks[0]}" in result["test"]]
    rows = [["", *(f"top-{k}, {_GROUPS[group]}" for k in config.all_ks for group in groups)]]
    rows.append(["---", *("---:" for _ in rows[0][1:])])
    for name, metrics in (("plain scores", result["test"]), ("corrected", result.get("test_corrected"))):
        if metrics:
            values = [metrics.get(f"{group}_top{k}") for k in config.all_ks for group in groups]
            rows.append([name, *("" if value is None else f"{100 * value:.1f}" for value in values)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _remarks(run: RunFolder) -> str:
    chosen = read_correction(run)
    how = "In percent. Of photos, every photo counts the same; of classes, every class does."
    return f"{how} Corrected for class sizes: {chosen}." if chosen else how


def _calibration(run: RunFolder) -> str:
    if not run.has("calibration.json"):
        return (
            "Not calibrated: scores rank the suggestions and are no probabilities. `shortlist calibrate` changes that."
        )
    record = run.read_record("calibration.json")
    error, before = (record.get(name, {}).get("all") for name in ("error", "error_before"))
    known = f" It was {100 * before:.1f} % before." if isinstance(before, float) else ""
    value = f"{100 * error:.1f} %" if isinstance(error, float) else "unknown"
    return (
        f"Calibrated on {counted(int(record.get('val_images', 0)), 'validation image')}: the expected calibration "
        f"error on test images is {value}.{known} Sets with a coverage rest on "
        f"{counted(len(record.get('set_images', [])), 'test image')}."
    )


def _call(config: RunConfig) -> str:
    if _takes_vectors(config):
        return "suggestions = predictor.suggest(vector)  # or an (N, d) array of them"
    return 'suggestions = predictor.suggest("photo.jpg")  # or a list of photos'


def _takes_vectors(config: RunConfig) -> bool:
    return config.data.name == "embeddings"


def _plain(text: str) -> str:
    """Text from files that is no Markdown and has no control characters."""
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>()#|!" else letter for letter in printable(text))
