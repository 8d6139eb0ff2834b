import numpy as np
import pytest
import torch
from long_tail import embeddings
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import top_k_accuracy_score
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.estimator_checks import check_estimator
from sklearn_estimator import BalancedSoftmax, macro_topk, suggest

from tests.support.examples import run_example


def test_the_example_runs() -> None:
    printed = run_example("sklearn_estimator", "--folds", "2")
    assert "logistic regression, corrected" in printed
    assert "three suggestions: species" in printed


def test_the_estimator_does_what_scikit_learn_expects() -> None:
    results = check_estimator(BalancedSoftmax(), on_fail=None, on_skip=None)
    assert {result["check_name"] for result in results if result["status"] == "failed"} == set()
    assert sum(result["status"] == "passed" for result in results) > 40


def test_without_the_adjustment_it_is_logistic_regression() -> None:
    x, y = (tensor.numpy() for tensor in embeddings().train)
    weight_decay = 0.01
    ours = BalancedSoftmax(tau=0, weight_decay=weight_decay, max_iter=500).fit(x, y)
    theirs = LogisticRegression(C=1 / (2 * weight_decay * len(y)), tol=1e-8, max_iter=2000).fit(x.astype(float), y)
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x.astype(float)), atol=1e-3)


def test_the_scorer_is_the_top_k_accuracy_of_scikit_learn_with_classes_weighted_equally() -> None:
    data = embeddings()
    names = np.array([f"species {number}" for number in range(30)])
    (x, y), (test_x, test_y) = ((part.inputs.numpy(), names[part.labels.numpy()]) for part in (data.train, data.test))
    test_x, test_y = test_x[:250], test_y[:250]  # not as many of every class
    classifier = LogisticRegression(max_iter=20, tol=0.1).fit(x, y)
    scores = classifier.decision_function(test_x)
    weights = compute_sample_weight("balanced", test_y)
    want = top_k_accuracy_score(test_y, scores, k=3, labels=classifier.classes_, sample_weight=weights)
    assert macro_topk(3)(classifier, test_x, test_y) == pytest.approx(want, abs=1e-6)


def test_images_of_classes_that_were_never_seen_count_as_wrong() -> None:
    x, y = (tensor.numpy() for tensor in embeddings().test)
    known = y >= 6  # the first six columns are missing, so labels are not columns
    classifier = BalancedSoftmax(max_iter=20).fit(x[known], y[known])
    assert len(classifier.classes_) == 24
    accuracy_of_known = macro_topk(3)(classifier, x[known], y[known])
    assert accuracy_of_known > 0.9
    assert macro_topk(3)(classifier, x, y) == pytest.approx(accuracy_of_known * 24 / 30, abs=1e-6)


def test_suggestions_begin_with_the_prediction_and_are_different_labels() -> None:
    x, y = (tensor.numpy() for tensor in embeddings().train)
    classifier = BalancedSoftmax(max_iter=20).fit(x, y)
    suggested = suggest(classifier, x[:50], 3)
    np.testing.assert_array_equal(suggested[:, 0], classifier.predict(x[:50]))
    assert all(len(set(row)) == 3 for row in torch.tensor(suggested).tolist())
