"""Weights of new classes in a last layer."""

import pytest
import torch
from torch import Tensor, nn

from shortlist import CosineLinear
from shortlist.program.predicting import new_class_weights
from shortlist.program.predicting.new_class_weights import Known, extended_head

OLD, NEW, FEATURES, K = 12, 1, 8, 3


def clusters(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = 1 + torch.randn(OLD + NEW, FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(OLD + NEW).repeat(30)
    return centres[labels] + 0.7 * torch.randn(len(labels), FEATURES, generator=generator), labels


@pytest.fixture(params=[nn.Linear, CosineLinear])
def head(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    head: nn.Module = request.param(FEATURES, OLD)
    features, labels = clusters(1)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        loss(head(features[labels < OLD]), labels[labels < OLD]).backward()
        optimizer.step()
    return head


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(10 * scores, labels)


class _Loss(nn.Module):
    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return loss(scores, labels)


def extended(head: nn.Module, most: int | None = None, k: int = K) -> nn.Module:
    train, labels = clusters(1)
    val, val_labels = clusters(2)
    photos = [train[labels == label][:most] for label in range(OLD, OLD + NEW)]
    is_old, is_old_val = labels < OLD, val_labels < OLD
    known = Known(train[is_old], labels[is_old], val[is_old_val], val_labels[is_old_val])
    return extended_head(head, photos, known, _Loss(), k)


def frequencies(head: nn.Module, k: int, most: int | None = None) -> tuple[float, float]:
    """How often a new class, and an old class for images of others, is among the first k of the old."""
    val, labels = clusters(2)
    val, labels = val[labels < OLD], labels[labels < OLD]
    scores = extended(head, most)(val)
    limit = scores[:, :OLD].topk(k).values[:, -1:]
    of_others = torch.arange(OLD) != labels.unsqueeze(1)
    new, old = (scores[:, OLD:] > limit), (scores[:, :OLD] >= limit)[of_others]
    return new.double().mean().item(), old.double().mean().item()


def test_a_new_class_is_among_the_first_k_as_often_as_an_old_one_wrongly_is(head: nn.Module) -> None:
    new, old = frequencies(head, K)
    assert new == pytest.approx(old, abs=0.02)


def test_with_as_many_suggestions_as_classes_a_new_class_does_not_always_pass_an_old_one(head: nn.Module) -> None:
    val, labels = clusters(2)
    scores = extended(head, k=OLD)(val[labels < OLD])
    passes = scores[:, OLD] > scores[:, :OLD].amin(1)
    assert passes.double().mean() < 0.99


@pytest.mark.parametrize("head", [nn.Linear], indirect=True)
def test_one_photo_does_not_make_a_class_first_more_often_than_an_old_one_wrongly_is(head: nn.Module) -> None:
    new, old = frequencies(head, 1, most=1)
    assert new <= old


def test_old_weights_stay_as_they_are(head: nn.Module) -> None:
    for name, values in extended(head).named_parameters():
        assert values[:OLD].equal(head.get_parameter(name))


def test_steps_tell_new_classes_apart_better(head: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = clusters(1)

    def lowest_loss() -> float:
        """At the height of the new scores that suits them best: steps do not choose it."""
        scores = extended(head)(features).detach()
        is_new = torch.arange(OLD + NEW) >= OLD
        return min(float(loss(scores + shift * is_new, labels)) for shift in torch.linspace(-4, 4, 81))

    learnt = lowest_loss()
    monkeypatch.setattr(new_class_weights, "_STEP_SIZE", 0.0)
    assert learnt < lowest_loss()


def test_few_photos_stay_close_to_the_start(head: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def direction() -> Tensor:
        return nn.functional.normalize(extended(head, 1).get_parameter("weight")[OLD:])

    found = direction()
    monkeypatch.setattr(new_class_weights, "_TRUSTED", 0)
    of_many = direction()
    monkeypatch.setattr(new_class_weights, "_STEP_SIZE", 0.0)
    start = direction()
    assert ((found * start).sum(1) > (of_many * start).sum(1)).all()
