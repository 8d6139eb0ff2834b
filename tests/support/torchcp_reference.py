"""Makes ``tests/torchcp_reference.json``: what TorchCP says about the problems of ``tests/conformal_reference.json``.

It needs TorchCP 1.2.1 and nothing of shortlist:

    python tests/support/torchcp_reference.py tests/conformal_reference.json tests/torchcp_reference.json

The methods that both have are TorchCP's score LAC, with one threshold (marginal) and with one for each class
(classwise).
"""

import importlib
import json
import sys
from pathlib import Path

import torch

PREDICTORS = {"marginal": "SplitPredictor", "classwise": "ClassConditionalPredictor"}


def main(problems: str, out: str) -> None:
    predictors, scores = (importlib.import_module(f"torchcp.classification.{part}") for part in ("predictor", "score"))
    torch.set_default_dtype(torch.float64)
    found = []
    for case in json.loads(Path(problems).read_text()):
        calibration, tested = (torch.tensor(case[part]).log() for part in ("cal", "test"))
        of_case = {}
        for coverage in case["found"]:
            of_coverage = {}
            for name, predictor in PREDICTORS.items():
                fitted = getattr(predictors, predictor)(score_function=scores.LAC(), alpha=1 - float(coverage))
                fitted.calculate_threshold(calibration, torch.tensor(case["labels"]))
                limits = torch.as_tensor(fitted.q_hat).expand(calibration.shape[1])
                sets = fitted.predict_with_logits(tested)
                of_coverage[name] = {
                    "limits": [str(limit) for limit in limits.tolist()],
                    "sets": ["".join(str(int(inside)) for inside in row) for row in sets.tolist()],
                }
            of_case[coverage] = of_coverage
        found.append(of_case)
    Path(out).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
