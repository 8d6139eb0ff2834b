import re

from tests.support.examples import run_example


def test_the_correction_lifts_the_rare_classes_of_cross_entropy() -> None:
    printed = run_example("plain_loop", "--epochs", "8")
    few = dict(re.findall(r"^(.*?) {2,}.*few_top3 ([\d.]+)%$", printed, flags=re.MULTILINE))
    assert len(few) == 6
    assert float(few["cross-entropy, corrected"]) > float(few["cross-entropy"])
    assert float(few["balanced softmax"]) > float(few["cross-entropy"])
