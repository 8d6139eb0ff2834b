"""A run for the Hugging Face hub: what a predictor needs, and a model card.

Training images, names of files, paths and the training state stay at home.
"""

import dataclasses
import re
import tempfile
from pathlib import Path

from shortlist.errors import ShortlistError
from shortlist.program.atomic_files import write_file
from shortlist.program.config import RunConfig, to_dict
from shortlist.program.models.hub import why_unreachable
from shortlist.program.predicting.hub_runs import (
    AS_THEY_ARE,
    CALIBRATION,
    CARD,
    CONFIG,
    FILES,
    PICTURES,
    RESULT,
    SCORES,
    HubAddress,
    check_package,
    explained,
)
from shortlist.program.predicting.predictor import Predictor
from shortlist.program.runs.card import card_text
from shortlist.program.runs.folder import ADDED, RunFolder
from shortlist.program.runs.records import read_added, read_result


def push_run(run: RunFolder, repository: str, *, public: bool = False, pictures: bool = False) -> str:
    """Upload a run; returns its address on the web.

    Args:
        run: A finished one, or one with added classes.
        repository: ``OWNER/NAME``. It is created if need be.
        public: Everybody may read it, and not its owner alone.
        pictures: Upload the pictures of the run too: small copies of test and training images.

    Raises:
        ShortlistError: The run is unfinished or damaged, the hub refuses it, or the repository exists and is public
            without ``public``. Then nothing is uploaded.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ShortlistError(f"a repository must be OWNER/NAME, such as me/birds, got {repository!r}")
    check_package()
    if not run.is_usable:
        raise ShortlistError(f"{run.path} has not finished: finish it with --resume, then push it")
    from huggingface_hub import HfApi, constants

    address = HubAddress(repository)
    with tempfile.TemporaryDirectory() as folder:
        _write_copy(run, Path(folder), address, pictures=pictures)
        reason = why_unreachable()
        if reason:
            raise ShortlistError(f"{run.path} cannot be pushed: {reason}")
        with explained(address, reason):
            api = HfApi()
            api.create_repo(repository, private=not public, exist_ok=True)
            if not public and not api.model_info(repository).private:
                raise ShortlistError(
                    f"{repository} exists and is public: add --public to push there, or choose another name"
                )
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message="Push a run of shortlist",
                delete_patterns=[*FILES, *PICTURES],  # of an earlier push: they do not belong to these weights
            )
        return f"{constants.ENDPOINT}/{repository}"


def _write_copy(run: RunFolder, folder: Path, address: HubAddress, *, pictures: bool) -> None:
    """Write what is pushed to an empty folder, and see that it can be loaded."""
    copy = RunFolder(folder)
    for name in (*AS_THEY_ARE, *([SCORES] if run.has(CALIBRATION) else [])):  # sets rest on scores
        if run.has(name):
            write_file(folder / name, (run.path / name).read_bytes())
    copy.write_json(CONFIG, to_dict(_without_paths(run.config)))
    if run.finished:
        copy.write_json(RESULT, {name: value for name, value in read_result(run).items() if name != "skipped_files"})
    if added := read_added(run):
        copy.write_json(ADDED, dataclasses.asdict(added) | {"parent": Path(added.parent).name})
    if pictures:
        for pattern in PICTURES:
            for path in run.path.glob(pattern):
                write_file(folder / path.relative_to(run.path), path.read_bytes())
    write_file(folder / CARD, _card(run, address).encode())
    try:
        Predictor(copy, "cpu")
    except ShortlistError as error:
        raise ShortlistError(str(error).replace(str(folder), str(run.path))) from None


def _without_paths(config: RunConfig) -> RunConfig:
    """The same settings, with names in place of paths on this machine."""
    root = Path(config.data.root).name if config.data.is_named_by_root else ""
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, root=root),
        model=dataclasses.replace(config.model, weights=Path(config.model.weights).name),
    )


def _card(run: RunFolder, address: HubAddress) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    config = run.config
    is_images = config.data.name != "embeddings"
    data = Path(config.data.root).name if config.data.is_named_by_root else config.data.name
    result = read_result(run) if run.finished else {"test": {}}  # of added classes nothing is measured
    best = result.get("test_corrected") or result["test"]
    shown = {
        f"top-{k} accuracy, mean over {of}": best.get(f"{average}_top{k}")
        for k in config.all_ks
        for average, of in (("micro", "images"), ("macro", "classes"))
    }
    name = address.repository.partition("/")[2]
    metadata = ModelCardData(
        library_name="shortlist",
        pipeline_tag="image-classification" if is_images else None,
        tags=["shortlist", "top-k", *([] if is_images else ["embeddings"])],
        metrics=["accuracy"] if run.finished else None,
        model_name=name,
        eval_results=[
            EvalResult(
                task_type="image-classification" if is_images else "other",
                dataset_type=data,
                dataset_name=data,
                metric_type="accuracy",
                metric_name=metric,
                metric_value=value,
            )
            for metric, value in shown.items()
            if value is not None
        ],
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n{card_text(run, name=name, place=str(address))}"
