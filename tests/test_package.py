"""The public names, and the cost of importing them."""

import importlib.metadata
import importlib.resources
import inspect
import subprocess
import sys

import pytest

import shortlist as sl
from shortlist import functional, losses
from tests.support.processes import run_code

PUBLIC = [
    "CalibratedTopKHinge",
    "ClassParallelNoisedTopKHead",
    "ConvexTopKHinge",
    "CosineLinear",
    "FocalLoss",
    "ImbalancedNoisedTopKHinge",
    "LDAMLoss",
    "LogitAdjustedLoss",
    "MixedLoss",
    "NoisedAverageKHinge",
    "NoisedTopKHead",
    "NoisedTopKHinge",
    "PredictionSets",
    "PriorAdjusted",
    "PriorCorrection",
    "ScaledCosine",
    "SetMetrics",
    "ShortlistError",
    "SmoothTopKHinge",
    "TopKCrossEntropy",
    "TopKError",
    "TopKHinge",
    "TopKMetrics",
    "class_margins",
    "exact_topk",
    "functional",
    "load",
    "smooth_topk",
    "smooth_topk_sum",
    "topk_sum",
    "topk_value",
]
MODULE_OF = {
    "calibrated_topk_hinge": "CalibratedTopKHinge",
    "convex_topk_hinge": "ConvexTopKHinge",
    "focal": "FocalLoss",
    "imbalanced_noised_topk_hinge": "ImbalancedNoisedTopKHinge",
    "ldam": "LDAMLoss",
    "logit_adjusted": "LogitAdjustedLoss",
    "noised_average_k_hinge": "NoisedAverageKHinge",
    "noised_topk_hinge": "NoisedTopKHinge",
    "smooth_topk_hinge": "SmoothTopKHinge",
    "topk_cross_entropy": "TopKCrossEntropy",
    "topk_error": "TopKError",
    "topk_hinge": "TopKHinge",
}
every_loss_and_module = pytest.mark.parametrize(("function", "module"), MODULE_OF.items(), ids=MODULE_OF)


def run_python(code: str) -> str:
    """The output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Names


def test_the_public_names_are_these() -> None:
    assert sl.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(sl))


def test_a_misspelt_name_is_an_error_to_python_and_to_type_checkers() -> None:
    # mypy --strict reports an ignore that it does not need: it must find this name missing.
    with pytest.raises(AttributeError, match="TopKMetric"):
        sl.TopKMetric  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name: str) -> None:
    assert getattr(sl, name).__doc__


def test_the_losses_are_these() -> None:
    assert functional.__all__ == list(MODULE_OF)
    assert losses.__all__ == sorted(MODULE_OF.values())


@every_loss_and_module
def test_every_loss_has_a_module_twin_in_the_package_itself(function: str, module: str) -> None:
    assert getattr(sl, module) is getattr(losses, module)
    assert f"shortlist.functional.{function}" in getattr(sl, module).__doc__


@every_loss_and_module
def test_a_module_takes_the_settings_of_its_function_with_the_same_defaults(function: str, module: str) -> None:
    of_function = inspect.signature(getattr(functional, function)).parameters
    of_module = inspect.signature(getattr(losses, module)).parameters
    of_call = inspect.signature(getattr(losses, module).forward).parameters
    for name, parameter in of_function.items():
        here = of_call if name in of_call else of_module
        assert here[name].default == parameter.default


def test_the_version_is_that_of_the_installed_package() -> None:
    assert sl.__version__ == importlib.metadata.version("shortlist")


def test_the_types_ship() -> None:
    assert (importlib.resources.files("shortlist") / "py.typed").is_file()


# Import


def test_importing_loads_nothing_of_weight_and_using_it_torch_alone() -> None:
    heavy = "torchmetrics matplotlib tyro rich timm torchvision PIL scipy pandas lightning_fabric"
    code = f"""
import sys
import shortlist
print("torch" in sys.modules)
import torch
before = set(sys.modules)
for name in set(shortlist.__all__) - {{"SetMetrics", "TopKMetrics", "load"}}:
    getattr(shortlist, name)
loaded = {{name.partition(".")[0] for name in sys.modules}}
added = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print("shortlist" in added, sorted(loaded & set("{heavy}".split())), "triton" in added)
"""
    assert run_python(code).split("\n") == ["False", "True [] False", ""]


def test_a_name_can_be_used_for_the_first_time_in_a_compiled_function() -> None:
    run_code("""
import sys
import torch
import shortlist as sl

assert "shortlist.functional" not in sys.modules

@torch.compile(backend="eager", fullgraph=True)
def loss(scores, target):
    return sl.functional.topk_hinge(scores, target, 1)

assert loss(torch.tensor([[3.0, 2.5, 1.0]]), torch.tensor([0])).item() == 0.5
""")


@pytest.mark.parametrize("module", ["cli", "report.page", "runs", "tuning.space", "reproduce.registry"])
def test_what_takes_seconds_to_import_is_left_to_those_who_need_it(module: str) -> None:
    heavy = {"torchmetrics", "torchvision", "lightning_fabric", "timm", "matplotlib", "optuna", "tensorboard"}
    code = f"import sys, shortlist.program.{module}; print(*sorted({heavy} & set(sys.modules)))"
    assert run_python(code) == "\n"


def test_without_torchmetrics_only_the_metrics_are_missing() -> None:
    code = """
import sys
sys.modules["torchmetrics"] = None
import importlib.util, inspect
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torchmetrics" else found(name, *rest)
import shortlist
from shortlist import *
NoisedTopKHinge(1)
assert inspect.getmembers(shortlist)
try:
    shortlist.TopKMetrics
except ImportError as error:
    print(error)
"""
    assert "pip install 'shortlist[metrics]'" in run_python(code)


def test_without_its_packages_the_program_says_what_it_takes() -> None:
    code = "import sys; sys.modules['tyro'] = None; from shortlist.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "shortlist: the program needs tyro: pip install 'shortlist[train]'\n"


def test_where_the_program_cannot_run_no_package_is_asked_for() -> None:
    code = "import sys; sys.modules['fcntl'] = None; sys.argv = ['shortlist', 'demo']\n"  # as on Windows
    code += "from shortlist.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "shortlist: the program runs on Linux and macOS; the library runs elsewhere too\n"


def test_where_the_program_cannot_run_the_library_can_be_imported_whole() -> None:
    code = """
import sys
sys.modules["fcntl"] = None  # as on Windows
import shortlist
from shortlist import *
NoisedTopKHinge(1), TopKMetrics(3, ks=(1,))
try:
    shortlist.load
except ImportError as error:
    print(error)
"""
    message = run_python(code)
    assert "Linux and macOS" in message
    assert "pip install" not in message
