"""A classifier for scikit-learn that suggests K classes: embeddings in pipelines, searches and cross-validation.

Run it: python examples/sklearn_estimator.py
"""

import argparse
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from long_tail import NUM_CLASSES, embeddings
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

import shortlist as sl


class BalancedSoftmax(ClassifierMixin, BaseEstimator):
    """A linear layer trained with balanced softmax: rare classes count as much as frequent ones.

    Args:
        tau: Strength of the adjustment for class sizes; 0 is cross-entropy.
        weight_decay: Factor of the squared weights that are added to the loss.
        max_iter: Steps of L-BFGS.
    """

    def __init__(self, tau: float = 1.0, weight_decay: float = 0.01, max_iter: int = 50) -> None:
        self.tau = tau
        self.weight_decay = weight_decay
        self.max_iter = max_iter

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        features, names = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(names)
        # Only classes that occur: in a fold of a cross-validation, some rare ones may not.
        self.classes_, labels, sizes = np.unique(names, return_inverse=True, return_counts=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must have two classes or more, got one class: {self.classes_[0]!r}")
        inputs, target = torch.tensor(features), torch.tensor(labels)
        criterion = sl.LogitAdjustedLoss(torch.from_numpy(sizes), tau=self.tau)
        layer = nn.Linear(features.shape[1], len(self.classes_), dtype=torch.float64)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=self.max_iter, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = criterion(layer(inputs), target) + self.weight_decay * layer.weight.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        self.n_iter_ = optimizer.state_dict()["state"][0]["n_iter"]
        self.coef_, self.intercept_ = (parameter.detach().numpy() for parameter in layer.parameters())
        return self

    def scores(self, X: ArrayLike) -> NDArray[np.float64]:
        """``(N, L)``, a column for each of ``classes_``."""
        check_is_fitted(self)
        return validate_data(self, X, dtype=np.float64, reset=False) @ self.coef_.T + self.intercept_

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """The scores; of two classes, one column, as scikit-learn has it."""
        scores = self.scores(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Probabilities, for data in which all classes are equally frequent."""
        return torch.from_numpy(self.scores(X)).softmax(1).numpy()

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        best = self.scores(X).argmax(1)
        return self.classes_[best]


def scores_and_columns(estimator: Any, X: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
    """Scores of a classifier, and the column of each label in them.

    The columns are ``estimator.classes_``: in the order of their names, and perhaps fewer than the classes of ``y``.
    Labels that the classifier has never seen get columns of their own, below all others: they count as wrong.
    """
    y = np.asarray(y)
    classes = np.concatenate([estimator.classes_, np.setdiff1d(y, estimator.classes_)])
    column_of = {name: column for column, name in enumerate(classes.tolist())}
    scores = torch.tensor(estimator.decision_function(X))
    scores = nn.functional.pad(scores, (0, len(classes) - scores.shape[1]), value=-torch.inf)
    return scores, torch.tensor([column_of[name] for name in y.tolist()])


def suggest(estimator: Any, X: ArrayLike, k: int) -> NDArray[Any]:
    """``(N, K)`` labels, the best first. Not a method: a pipeline would hide it."""
    best = torch.tensor(estimator.decision_function(X)).topk(k).indices
    return estimator.classes_[best]


def macro_topk(k: int) -> Callable[[Any, ArrayLike, ArrayLike], float]:
    """For ``scoring=``: macro top-K accuracy of any classifier of three or more classes."""

    def scorer(estimator: Any, X: ArrayLike, y: ArrayLike) -> float:
        scores, columns = scores_and_columns(estimator, X, y)
        metrics = sl.TopKMetrics(scores.shape[1], ks=(k,))
        metrics.update(scores, columns)
        return metrics.compute()[f"macro_top{k}"].item()

    return scorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folds", type=int, default=3)
    folds = parser.parse_args().folds

    names = np.array([f"species {number}" for number in range(NUM_CLASSES)])
    (train_x, train_y), (val_x, val_y), (test_x, test_y) = (
        (samples.inputs.numpy(), names[samples.labels.numpy()]) for samples in embeddings()
    )
    logistic = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    balanced = GridSearchCV(
        make_pipeline(StandardScaler(), BalancedSoftmax()),
        {"balancedsoftmax__weight_decay": [0.001, 0.01, 0.1]},
        scoring=macro_topk(3),
        cv=StratifiedKFold(folds, shuffle=True, random_state=0),
    )
    for name, classifier in (("logistic regression", logistic), ("balanced softmax", balanced)):
        classifier.fit(train_x, train_y)
        top1, top3 = (macro_topk(k)(classifier, test_x, test_y) for k in (1, 3))
        print(f"{name:32} macro_top1 {top1:.1%}  macro_top3 {top3:.1%}")

    # A classifier of scikit-learn can be corrected afterwards, on validation data.
    _, sizes = np.unique(train_y, return_counts=True)  # in the order of classes_
    correction = sl.PriorCorrection(torch.tensor(sizes))
    correction.fit(*scores_and_columns(logistic, val_x, val_y), k=3)
    scores, columns = scores_and_columns(logistic, test_x, test_y)
    metrics = sl.TopKMetrics(NUM_CLASSES, ks=(1, 3))
    metrics.update(correction(scores), columns)
    result = metrics.compute()
    name = "logistic regression, corrected"
    print(f"{name:32} macro_top1 {result['macro_top1']:.1%}  macro_top3 {result['macro_top3']:.1%}")
    print("three suggestions:", ", ".join(suggest(balanced, test_x[:1], 3)[0]))


if __name__ == "__main__":
    main()
