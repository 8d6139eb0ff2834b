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


def extended(head: nn.Module, most: int | None = None) -> nn.Module:
    train, labels = clusters(1)
    val, val_labels = clusters(2)
    photos = [train[labels == label][:most] for label in range(OLD, OLD + NEW)]
    known = Known(train[labels < OLD], labels[labels < OLD], val[val_labels < OLD])
    return extended_head(head, photos, known, _Loss(), K)


def test_a_new_class_is_among_the_first_k_as_often_as_an_old_one(head: nn.Module) -> None:
    val, labels = clusters(2)
    scores = extended(head)(val[labels < OLD])
    limit = scores[:, :OLD].topk(K).values[:, -1:]
    share = (scores[:, OLD:] > limit).double().mean(0)
    assert share.tolist() == pytest.approx([K / OLD] * NEW, abs=0.02)


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
