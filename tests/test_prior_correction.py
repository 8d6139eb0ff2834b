"""The correction for the prior: its exact curve, its choice of tau, and its contract as a Module."""

import math

import pytest
import torch
from torch import Tensor

import shortlist as sl
from shortlist import PriorCorrection, ShortlistError, TopKMetrics

LOWEST = torch.finfo(torch.float32).min


class LongTail:
    """Normal features in classes of known means and prior, so that the scores are the true log posterior."""

    def __init__(self, seed: int, num_classes: int = 40, imbalance: float = 100) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.means = 1.3 * torch.randn(num_classes, 5, generator=self.generator)
        prior = torch.logspace(0, -math.log10(imbalance), num_classes)
        self.prior = prior / prior.sum()
        self.class_counts = (self.prior * 10000).round().long()

    def labels(self, images: int) -> Tensor:
        return torch.multinomial(self.prior, images, replacement=True, generator=self.generator)

    def scores(self, labels: Tensor) -> Tensor:
        features = self.means[labels] + torch.randn(len(labels), 5, generator=self.generator)
        return -torch.cdist(features, self.means).square() / 2 + self.prior.log()


def accuracy(correction: PriorCorrection, tau: float, scores: Tensor, target: Tensor, name: str) -> float:
    """As TopKMetrics has it, of the corrected scores in float64."""
    metrics = TopKMetrics(scores.shape[-1], ks=(int(name.partition("_top")[2]),))
    correction.tau.fill_(tau)
    metrics.update(correction(scores.double()), target)
    return metrics.compute()[name].item()


def middle_of_highest_step(correction: PriorCorrection, scores: Tensor, target: Tensor, k: int) -> float:
    """The obvious choice of tau."""
    taus, accuracies = correction.curve(scores, target, k, up_to=4)
    ends = torch.cat([taus, taus.new_tensor([4.0])])
    best = accuracies.argmax()
    return ((ends[best] + ends[best + 1]) / 2).item()


# The curve


@pytest.mark.parametrize("average", ["macro", "micro"])
@pytest.mark.parametrize("k", [1, 3, 12])
def test_the_curve_is_the_accuracy_at_every_tau(average: str, k: int) -> None:
    torch.manual_seed(k)
    scores, target = torch.randn(30, 12), torch.randint(12, (30,))
    correction = PriorCorrection([500, 300, 300, 100, 90, 50, 20, 20, 10, 5, 2, 1])
    taus, values = correction.curve(scores, target, k, average)  # type: ignore[arg-type]
    assert taus[0] == 0
    assert (taus.diff() > 0).all()
    for tau in torch.cat([torch.linspace(0.001, 6, 150), torch.tensor([100.0])]).double():
        value = values[torch.searchsorted(taus, tau) - 1].item()
        assert value == pytest.approx(accuracy(correction, tau.item(), scores, target, f"{average}_top{k}"))


def test_the_curve_of_several_k_is_the_mean_of_theirs() -> None:
    torch.manual_seed(0)
    scores, target = torch.randn(30, 12), torch.randint(12, (30,))
    correction = PriorCorrection([500, 300, 300, 100, 90, 50, 20, 20, 10, 5, 2, 1])
    together, *alone = (correction.curve(scores, target, k) for k in ((3, 1, 12), 1, 3, 12))
    at = torch.linspace(0.001, 6, 150, dtype=torch.float64)
    mean, *each = (values[torch.searchsorted(taus, at) - 1] for taus, values in (together, *alone))
    torch.testing.assert_close(mean, torch.stack(each).mean(0))


def test_a_tie_with_the_kth_score_counts_as_correct_beyond_all_ties_at_zero() -> None:
    """At tau = 0 the two classes tie; for any tau > 0 the rarer one is above."""
    correction, scores = PriorCorrection([9, 1]), torch.zeros(1, 2)
    assert correction.curve(scores, torch.tensor([1]), k=1)[1].tolist() == [1]
    assert correction.curve(scores, torch.tensor([0]), k=1)[1].tolist() == [0]
    even = PriorCorrection([5, 5])
    assert even.curve(scores, torch.tensor([0]), k=1)[1].tolist() == [1]


def test_nan_and_infinite_scores_count_as_in_the_metrics() -> None:
    nan, inf = math.nan, math.inf
    rows = [[nan, 1.0, 2.0], [1.0, nan, 2.0], [inf, inf, 0.0], [-inf, 0.0, 1.0], [0.0, -inf, -inf]]
    scores, target = torch.tensor(rows * 2), torch.tensor([0, 2, 1, 0, 2, 1, 1, 0, 1, 1])
    correction = PriorCorrection([50, 10, 2])
    for k in (1, 2, 3):
        taus, values = correction.curve(scores, target, k, "micro")
        for tau in (0.01, 0.7, 5.0):
            value = values[torch.searchsorted(taus, tau) - 1].item()
            assert value == pytest.approx(accuracy(correction, tau, scores, target, f"micro_top{k}")), (k, tau)
    assert math.isfinite(correction.fit(scores, target, k=1).tau.item())


def test_the_curve_and_the_choice_do_not_depend_on_the_size_of_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = LongTail(0)
    target = data.labels(100)
    scores, correction = data.scores(target), PriorCorrection(data.class_counts)
    taus, values = correction.curve(scores, target)
    tau = correction.fit(scores, target).tau.item()
    monkeypatch.setattr("shortlist.prior_correction._AT_ONCE", 7 * scores.shape[1])
    again = correction.curve(scores, target)
    torch.testing.assert_close(again, (taus, values))
    assert correction.fit(scores, target).tau.item() == pytest.approx(tau, rel=1e-5)


# The choice of tau


@pytest.mark.parametrize(("average", "best"), [("macro", 1.0), ("micro", 0.0)])
def test_for_a_calibrated_model_tau_is_near_one_for_macro_and_near_zero_for_micro(average: str, best: float) -> None:
    chosen = []
    for seed in range(4):
        data = LongTail(seed)
        target = data.labels(2000)
        correction = PriorCorrection(data.class_counts)
        chosen.append(correction.fit(data.scores(target), target, 5, average).tau)  # type: ignore[arg-type]
    assert torch.stack(chosen).mean().item() == pytest.approx(best, abs=0.15)


def test_it_generalises_better_than_the_highest_step_if_the_tail_has_no_validation_images() -> None:
    """And better than no correction: macro top-5 of many images of every class, mean over seeds."""
    gain_over_step, gain_over_none = [], []
    for seed in range(8):
        data = LongTail(seed)
        target = data.labels(150)
        assert len(target.unique()) < 40
        scores, correction = data.scores(target), PriorCorrection(data.class_counts)
        unseen = torch.arange(40).repeat(60)
        unseen_scores = data.scores(unseen)
        obvious = middle_of_highest_step(correction, scores, target, k=5)
        chosen = correction.fit(scores, target).tau.item()
        none, step, ours = (
            accuracy(correction, tau, unseen_scores, unseen, "macro_top5") for tau in (0, obvious, chosen)
        )
        gain_over_none.append(ours - none)
        gain_over_step.append(ours - step)
    assert sum(gain_over_none) / 8 > 0.03
    assert sum(gain_over_step) / 8 > 0.005


def test_several_k_choose_better_where_nearly_every_label_is_among_the_k_best() -> None:
    """And not worse for the largest of them: one tau is right for all."""
    gains = {"macro_top1": 0.0, "macro_top5": 0.0}
    for seed in range(8):
        data = LongTail(seed, num_classes=12)
        target = data.labels(300)
        scores, correction = data.scores(target), PriorCorrection(data.class_counts)
        unseen = torch.arange(12).repeat(200)
        unseen_scores = data.scores(unseen)
        by_one, by_several = (correction.fit(scores, target, k).tau.item() for k in (5, (1, 3, 5)))
        for name in gains:
            one, several = (accuracy(correction, tau, unseen_scores, unseen, name) for tau in (by_one, by_several))
            gains[name] += (several - one) / 8
    assert gains["macro_top1"] > 0.005
    assert gains["macro_top5"] > -0.002


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_the_choice_scales_with_the_scores(factor: float) -> None:
    """Cosines and the scores of a hinge are on other scales than log-probabilities."""
    data = LongTail(1)
    target = data.labels(500)
    scores, correction = data.scores(target), PriorCorrection(data.class_counts)
    tau = correction.fit(scores, target).tau.item()
    assert tau > 0
    assert correction.fit(factor * scores, target).tau.item() == pytest.approx(factor * tau, rel=1e-3)


@pytest.mark.parametrize("scores", [torch.eye(4), torch.zeros(4, 4)], ids=["all correct", "all the same"])
def test_where_nothing_can_be_gained_nothing_is_changed(scores: Tensor) -> None:
    assert PriorCorrection([100, 10, 5, 1]).fit(scores, torch.arange(4), k=1).tau == 0


def test_scores_that_say_nothing_of_the_labels_are_not_corrected_by_thousands() -> None:
    """No temperature makes them log-probabilities, so there is no unit for tau."""
    for seed in range(12):
        data, generator = LongTail(seed), torch.Generator().manual_seed(seed)
        labels = data.labels(300)
        scores = torch.randn(300, 40, generator=generator) - 0.3 * torch.nn.functional.one_hot(labels, 40)
        assert PriorCorrection(data.class_counts).fit(scores, labels).tau < 10


def test_it_says_what_tau_rests_on() -> None:
    correction = PriorCorrection([9, 5, 3, 1]).fit(torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 1, 3]), k=2)
    assert (int(correction.images), int(correction.classes), correction.num_classes) == (6, 3, 4)
    assert "images=6, classes=3" in repr(correction)


def test_it_refuses_to_choose_without_images() -> None:
    correction = PriorCorrection([9, 1, 0], leave_out=[2])
    for scores, target in (
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)),
        (torch.eye(3)[2:], torch.tensor([2])),
    ):
        with pytest.raises(ShortlistError, match="at least one validation image"):
            correction.fit(scores, target, k=1)


# The Module


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 4, 3), (0, 3)])
def test_corrected_scores_are_the_formula_in_any_shape_and_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    correction = PriorCorrection([6, 3, 1])
    correction.tau.fill_(0.75)
    scores = torch.randn(shape, dtype=dtype)
    log_prior = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    corrected = correction(scores)
    assert corrected.dtype == dtype
    torch.testing.assert_close(corrected, (scores.double() - 0.75 * log_prior).to(dtype))


def test_before_the_fit_it_changes_nothing() -> None:
    scores = torch.randn(4, 3)
    assert torch.equal(PriorCorrection([6, 3, 1])(scores), scores)


def test_the_state_dict_keeps_tau_and_what_it_rests_on() -> None:
    data = LongTail(2)
    target = data.labels(50)
    fitted = PriorCorrection(data.class_counts).fit(data.scores(target), target)
    loaded = PriorCorrection(torch.ones(40, dtype=torch.int64))
    loaded.load_state_dict(fitted.state_dict())
    scores = data.scores(target)
    assert torch.equal(loaded(scores), fitted(scores))
    assert repr(loaded) == repr(fitted)


def test_a_network_in_half_precision_does_not_round_tau() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), PriorCorrection([6, 3, 1]))
    correction = network[1]
    assert isinstance(correction, PriorCorrection)
    correction.tau.fill_(0.7654321)
    network.half()
    assert correction.tau.item() == pytest.approx(0.7654321, rel=1e-7)
    assert network(torch.ones(1, 2, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_class_that_is_left_out_is_never_suggested(dtype: torch.dtype) -> None:
    correction = PriorCorrection([5, 0, 20, 1], leave_out=(1,))
    scores = torch.tensor([[0.0, 9.0, 1.0, 2.0]], dtype=dtype)
    assert correction(scores)[0, 1] == torch.finfo(dtype).min
    assert 1 not in correction.fit(scores, torch.tensor([3]), k=1)(scores).topk(3).indices


def test_a_class_that_is_left_out_takes_no_place_in_the_choice() -> None:
    """The curve is that of the other classes alone."""
    torch.manual_seed(0)
    scores, target = torch.randn(40, 5), torch.randint(4, (40,))
    with_it = PriorCorrection([50, 20, 5, 1, 0], leave_out=[4]).curve(scores, target, k=2)
    without = PriorCorrection([50, 20, 5, 1]).curve(scores[:, :4], target, k=2)
    torch.testing.assert_close(with_it, without)


def test_a_class_without_a_training_image_is_an_error_that_names_it() -> None:
    with pytest.raises(ShortlistError, match="class 1"):
        PriorCorrection([5, 0, 2])
    with pytest.raises(ShortlistError, match="class 2"):
        PriorCorrection([5, 0, 0], leave_out=(1,))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"k": 0}, "k must"),
        ({"k": 4}, "k must"),
        ({"k": (1, 4)}, "k must"),
        ({"k": (1, 1)}, "k must"),
        ({"k": ()}, "k must"),
        ({"average": "weighted"}, "average"),
        ({"target": torch.tensor([0, 3])}, "target"),
        ({"target": torch.tensor([0])}, "target"),
        ({"target": torch.eye(3)[:2]}, "target"),
        ({"scores": torch.zeros(2, 5)}, "scores"),
        ({"scores": torch.zeros(2, 3, dtype=torch.int64)}, "scores"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], named: str) -> None:
    usual = {"scores": torch.zeros(2, 3), "target": torch.tensor([0, 1]), "k": 1}
    with pytest.raises(ShortlistError, match=named):
        sl.PriorCorrection([3, 2, 1]).fit(**(usual | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("leave_out", [(3,), (-1,), (0,), ("a",)])
def test_a_class_to_leave_out_must_exist_without_a_training_image(leave_out: tuple[int, ...]) -> None:
    with pytest.raises(ShortlistError, match="leave_out"):
        PriorCorrection([3, 2, 1], leave_out=leave_out)


def test_some_class_must_remain() -> None:
    with pytest.raises(ShortlistError, match="leave_out"):
        PriorCorrection([0, 0], leave_out=(0, 1))
