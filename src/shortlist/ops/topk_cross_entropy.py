"""The top-K cross-entropy: -log of the probability that the label is among the K largest of ``s + G``, G Gumbel noise.

Class j arrives after an exponential waiting time with rate ``exp(s_j)``, and the K largest of ``s + G`` are the first K
to arrive. In units of the label's mean waiting time, let class j have rate ``w_j = exp(s_j - s_y)``, and let T be the
time at which the K-th of the *other* classes arrives. The label misses the K best if it arrives after T, so

    P(miss) = E exp(-T) = integral of exp(-v) f(v) dv,      P(hit) = integral of (1 - exp(-v)) f(v) dv,
    f(v) = sum over j of w_j P(class j has not arrived at time v, and K - 1 of the others have),

and the derivative of P(miss) in ``s_j`` is the integral of ``v exp(-v)`` times the term of class j in f. So both
probabilities and all gradients are integrals of the same positive functions: nothing cancels, whatever is small.

At a given time the number of arrivals is a sum of independent indicators with probabilities ``1 - exp(-v w_j)``, and
``poisson_binomial`` counts them. In ``t = log v`` the integrands are analytic and vanish at both ends, so the
trapezoidal rule converges exponentially fast. Left of their peak they fall at least like ``exp(t)``, right of it like
``exp(-exp(t))``; the peak is close to ``t = -log(1 + the rates of all but the K - 1 fastest others)``.

In long rows only the fastest classes are counted one by one. The others are slow: up to the last time that matters,
each has a small probability to arrive. All that is needed of them is power sums of their rates (``_Slow``).

With several K, probabilities are averaged over K.

Shape suffixes: R rows, J classes other than the label, T times, K counts from 0 to K - 1, I powers from 0 to K - 1,
P powers of a rate from 1 to P.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shortlist.ops.poisson_binomial import counts_and_mean_without_each

# Cells (rows x times x classes) that are worked on together.
_CELLS_AT_ONCE = 2**20

# Above this K no class counts as slow: the power sums would need too many terms.
_MAX_K_WITH_SLOW = 32

# A class with exp(80) expected arrivals has arrived. More would overflow.
_LOG_MAX_ARRIVALS = 80.0


def topk_cross_entropy(others_RJ: Tensor, own_R: Tensor, ks: tuple[int, ...]) -> Tensor:
    """The loss of each row. R may be several dimensions.

    Args:
        others_RJ: Scores of the classes other than the label, float32 or float64.
        own_R: Scores of the labels.
        ks: One or several K, from 1 to J.
    """
    loss_R: Tensor = _TopKCrossEntropy.apply(others_RJ.reshape(-1, others_RJ.shape[-1]), own_R.reshape(-1), ks)[0]
    return loss_R.reshape(own_R.shape)


class _TopKCrossEntropy(torch.autograd.Function):
    """Forward computes the gradient too: both come from the same numbers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(others_RJ: Tensor, own_R: Tensor, ks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return loss_and_gradient(others_RJ, own_R, ks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient_RJ = upstream[0].unsqueeze(-1) * ctx.saved_tensors[0]
        return gradient_RJ, -gradient_RJ.sum(-1), None


class Times(NamedTuple):
    """Times at which the integrands are evaluated, as logarithms relative to the centre of the window."""

    first: float
    step: float
    number: int


def times_for(k: int, dtype: torch.dtype) -> Times:
    """As many as it takes for an error of the integrals of about 1e-7 in float32, and 1e-11 in float64."""
    digits = -math.log(2e-7 if dtype == torch.float32 else 1e-11)
    # The K-th of many equal classes arrives after a time with the law Gamma(K): hardly later than this.
    last = math.log(k + math.sqrt(2 * digits * k) + 1.5 * digits)
    # A step h integrates a Gaussian of deviation s up to exp(-2 (pi s / h)^2). The logarithm of a Gamma(K) variable is
    # almost one, with variance 1 / K; for small K its characteristic function falls like exp(-pi w / 2).
    step = min(math.pi * math.sqrt(2 / ((digits + 2) * (k + 1))), math.pi**2 / (digits + 12))
    count = math.ceil((digits + last) / step) + 1
    return Times(-digits, (digits + last) / (count - 1), count)


def loss_and_gradient(others_RJ: Tensor, own_R: Tensor, ks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``(R,)`` losses, and ``(R, J)`` derivatives in the other scores; that in the own score is minus their sum."""
    num_rows, num_others = others_RJ.shape
    num_counted = _num_counted(num_others, max(ks))
    # A step that depends on the shape would make the compiler recompile for each shape: there, take all rows at once.
    cells_per_row = times_for(max(ks), others_RJ.dtype).number * num_counted
    step = num_rows if torch.compiler.is_compiling() else max(1, _CELLS_AT_ONCE // cells_per_row)
    if torch.compiler.is_compiling() or num_rows <= step:
        return _of_rows(others_RJ, own_R, ks, num_counted)
    parts = zip(torch.split(others_RJ, step), torch.split(own_R, step), strict=True)
    losses, gradients = zip(*(_of_rows(others, own, ks, num_counted) for others, own in parts), strict=True)
    return torch.cat(losses), torch.cat(gradients)


def _num_counted(num_others: int, k: int) -> int:
    """How many of the fastest classes are counted one by one.

    Beyond the time at which even the slowest of them has arrived with probability 1 - 1/e, fewer than ``k`` arrivals
    are too improbable to matter.
    """
    enough = 3 * k + 32
    return num_others if k > _MAX_K_WITH_SLOW or num_others < 2 * enough else enough


def _of_rows(others_RJ: Tensor, own_R: Tensor, ks: tuple[int, ...], num_counted: int) -> tuple[Tensor, Tensor]:
    k, has_slow = max(ks), num_counted < others_RJ.shape[1]
    top = others_RJ.topk(num_counted if has_slow else k)
    level_R1 = top.values[:, k - 1 : k]  # scores relative to this keep their digits, whatever their size
    slow = None
    if has_slow:
        counted_RJ = _Difference(top.values, level_R1)
        slow = _Slow(others_RJ.scatter(1, top.indices, -math.inf), top.values[:, -1:], level_R1, k)
        log_rest_R = torch.logaddexp(counted_RJ.rounded[:, k - 1 :].logsumexp(1), slow.log_rate_R)
    else:
        counted_RJ = _Difference(others_RJ, level_R1)
        log_rest_R = counted_RJ.rounded.scatter(1, top.indices[:, : k - 1], -math.inf).logsumexp(1)
    window = _Window(log_rest_R.unsqueeze(1), _Difference(own_R.unsqueeze(1), level_R1), k)

    # The expected arrivals y of each class. Where they are few, its factor q + p z in the generating function of the
    # count is taken as exp(-y) (1 + (exp(y) - 1) z): a product of many q close to 1 would add up their rounding errors.
    y_RTJ = window.arrivals(counted_RJ)
    is_few_RTJ = y_RTJ < min(1.0, 0.8 * math.log(torch.finfo(own_R.dtype).max) / num_counted)
    few_RTJ = torch.where(is_few_RTJ, y_RTJ, 0)
    fails_RTJ = torch.where(is_few_RTJ, 1, (-y_RTJ).exp())
    happens_RTJ = torch.where(is_few_RTJ, torch.expm1(few_RTJ), -torch.expm1(-y_RTJ))
    log_factor_RT = -few_RTJ.sum(2)

    # P(K - 1 others have arrived) without each class in turn, averaged over the given K.
    if slow is None:
        shares_RTK = _mean_from_top(torch.ones_like(own_R).reshape(-1, 1, 1), ks)
    else:
        slow.arrive(window)
        log_factor_RT = log_factor_RT - slow.arrivals_RT
        shares_RTK = _mean_from_top(slow.counts_RTK, ks)
    counts_RTK, without_each_RTJ = counts_and_mean_without_each(happens_RTJ, fails_RTJ, shares_RTK)
    factor_RT = log_factor_RT.exp()
    intensity_RTJ = y_RTJ * fails_RTJ * without_each_RTJ * factor_RT.unsqueeze(2)
    intensity_RT = intensity_RTJ.sum(2)
    if slow is not None:
        counts_RTK = slow.together_with(counts_RTK)
        slow_intensity_RTP = slow.intensities(factor_RT.unsqueeze(2) * _mean_from_top(counts_RTK, ks))
        intensity_RT = intensity_RT + slow.total(slow_intensity_RTP)
    loss_R, weight_RT = window.loss_and_weights(factor_RT * _hit(counts_RTK, ks), intensity_RT, len(ks))
    gradient_RJ = (weight_RT.unsqueeze(1) @ intensity_RTJ).squeeze(1)
    if slow is not None:
        gradient_RJ = slow.gradient(weight_RT, slow_intensity_RTP).scatter(1, top.indices, gradient_RJ)
    return loss_R, gradient_RJ


class _Difference:
    """A difference of two numbers without rounding: with a rounded 70, exp(70) would be wrong in the sixth digit."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.rounded = x - y
        y_rounded = x - self.rounded
        self.error = (x - (self.rounded + y_rounded)) + (y_rounded - y)


class _Window:
    """The times of each row around the peak of the integrands, and the integrals."""

    def __init__(self, log_rest_R1: Tensor, own_R1: _Difference, k: int) -> None:
        """Logarithms of rates: the sum over all but the K - 1 fastest other classes, and the label's."""
        times = times_for(k, log_rest_R1.dtype)
        t_T = times.first + times.step * torch.arange(times.number, dtype=log_rest_R1.dtype, device=log_rest_R1.device)
        # Minus the logarithm of the time at the centre of the window: rest + own.
        self._log_centre_R1 = torch.logaddexp(log_rest_R1, own_R1.rounded)
        # The time at the centre in units of the label's mean waiting time.
        self._log_own_R = (own_R1.rounded - self._log_centre_R1 + own_R1.error).squeeze(1)
        self._own_RT = self._log_own_R.exp().unsqueeze(1) * t_T.exp()
        self._relative_time_T = t_T.exp()
        self._step = times.step

    def arrivals(self, log_rate_RJ: _Difference) -> Tensor:
        """``(R, T, J)`` expected arrivals of classes of these rates."""
        at_centre_RJ = _Difference(log_rate_RJ.rounded, self._log_centre_R1)
        error_RJ = (log_rate_RJ.error + at_centre_RJ.error).clamp(-0.5, 0.5)  # large only if the rate is 0 or clamped
        rate_RJ = at_centre_RJ.rounded.clamp(max=_LOG_MAX_ARRIVALS).exp() * (1 + error_RJ)
        return rate_RJ.unsqueeze(1) * self._relative_time_T.unsqueeze(1)

    def loss_and_weights(self, hit_RT: Tensor, intensity_RT: Tensor, num_ks: int) -> tuple[Tensor, Tensor]:
        """``(R,)`` losses, and the ``(R, T)`` weights with which the classes' intensities add up to the gradients.

        Args:
            hit_RT: The probability that a label that arrives at this time is among the K best, averaged over K.
            intensity_RT: Of the arrival of the K-th other class, averaged over K.
        """
        label_later_RT = self._step * (-self._own_RT).exp()
        # Relative to the time at the centre, and so never too small for a float.
        at_once_RT = self._relative_time_T * label_later_RT * hit_RT
        hit_R = at_once_RT.sum(1) + at_once_RT[:, 0] / math.expm1(self._step)  # to the left, it falls like exp(t)
        miss_R = (label_later_RT * intensity_RT).sum(1)
        # With several K, some may be reached before the window, but not if all of them are probably missed after it.
        log_hit_R = self._log_own_R + hit_R.log()
        by_miss_R = log_hit_R > math.log1p(-0.5 / num_ks)
        miss_R = torch.where(by_miss_R, miss_R, 0)
        loss_R = torch.where(by_miss_R, -torch.log1p(-miss_R), -log_hit_R)
        scale_R = torch.where(by_miss_R, self._log_own_R.exp() / (1 - miss_R), 1 / hit_R)
        return loss_R, scale_R.unsqueeze(1) * self._relative_time_T * label_later_RT


class _Slow:
    """The classes that are not counted one by one. Only power sums of their rates are needed.

    Let class j have y_j expected arrivals, and ``x_j = exp(y_j) - 1``. The generating function of the count is
    ``exp(-sum of y_j)`` times that of the elementary symmetric polynomials of the x. These follow from the power sums
    ``sum of x_j^i`` by Newton's identities, which alternate in sign, and so does ``1 / (1 + x_j z)``, which takes a
    class out of the count. Yet nothing cancels in the end: no x_j exceeds those of the classes that are counted one by
    one, and there are several times K of these. As all y_j are below 1, every ``x^i`` is a short power series in y.
    """

    def __init__(self, scores_RJ: Tensor, edge_R1: Tensor, level_R1: Tensor, k: int) -> None:
        """Scores, -inf for classes that do not belong here; ``edge`` is at least as large as all of them."""
        self._rates_RJ = (scores_RJ - edge_R1).exp()  # at most 1
        self._k = k
        num_powers = 2 * k + 14 if scores_RJ.dtype == torch.float32 else 3 * k + 20
        power_RJ, sums = self._rates_RJ, []
        for _ in range(num_powers):
            sums.append(power_RJ.sum(1))
            power_RJ = power_RJ * self._rates_RJ
        self._sums_RP = torch.stack(sums, 1)
        self._log_edge_R1 = _Difference(edge_R1, level_R1)
        self.log_rate_R = self._log_edge_R1.rounded.squeeze(1) + sums[0].log()
        # Coefficients of (exp(y) - 1)^i: (i / n) times the sum of those of y^(n-1) in this and the power before.
        i_I = torch.arange(k, dtype=scores_RJ.dtype, device=scores_RJ.device)
        columns = [(i_I == 0).to(i_I.dtype)]
        for n in range(1, num_powers + 1):
            columns.append(i_I / n * (columns[-1] + F.pad(columns[-1][:-1], (1, 0))))
        self._series_IP = torch.stack(columns, 1)[:, 1:]
        self._times_y_IP = torch.stack(columns, 1)[:, :-1]  # of y (exp(y) - 1)^i

    def arrive(self, window: _Window) -> None:
        """Set the expected arrivals, and the counts up to a factor exp(-arrivals)."""
        edge_RT = window.arrivals(self._log_edge_R1).squeeze(2)
        # At later times, fewer than K arrivals in all are too improbable to matter.
        latest_R1 = ((60 + 4 * self._k) / self._sums_RP[:, :1]).clamp(max=1)
        self._matters_RT = edge_RT <= latest_R1
        edge_RT = torch.minimum(edge_RT, latest_R1)
        self._powers_RTP = edge_RT.unsqueeze(2).expand(-1, -1, self._sums_RP.shape[1]).cumprod(2)
        sums_RTP = self._powers_RTP * self._sums_RP.unsqueeze(1)
        self.arrivals_RT = sums_RTP[..., 0]
        power_sums = (sums_RTP @ self._series_IP.T).unbind(2)
        counts = [torch.ones_like(self.arrivals_RT)]
        for m in range(1, self._k):
            terms = [(-1) ** (i + 1) * power_sums[i] * counts[m - i] for i in range(1, m + 1)]
            counts.append(torch.stack(terms).sum(0) / m)
        self.counts_RTK = torch.stack(counts, 2)

    def together_with(self, counts_RTK: Tensor) -> Tensor:
        """The counts of these and other classes together."""
        terms = [counts_RTK[..., i : i + 1] * self.counts_RTK[..., : self._k - i] for i in range(self._k)]
        return torch.stack([F.pad(term, (i, 0)) for i, term in enumerate(terms)]).sum(0)

    def intensities(self, shares_RTI: Tensor) -> Tensor:
        """For each time, the intensity of a class as a power series in its rate."""
        signs_I = 1 - 2 * (torch.arange(self._k, dtype=shares_RTI.dtype, device=shares_RTI.device) % 2)
        series_RTP = (signs_I * shares_RTI) @ self._times_y_IP * self._powers_RTP
        return torch.where(self._matters_RT.unsqueeze(2), series_RTP, 0)

    def total(self, intensity_RTP: Tensor) -> Tensor:
        return (intensity_RTP @ self._sums_RP.unsqueeze(2)).squeeze(2)

    def gradient(self, weight_RT: Tensor, intensity_RTP: Tensor) -> Tensor:
        series_RP = (weight_RT.unsqueeze(1) @ intensity_RTP).squeeze(1)
        gradient_RJ = torch.zeros_like(self._rates_RJ)
        for coefficient_R in series_RP.flip(1).unbind(1):
            gradient_RJ = (gradient_RJ + coefficient_R.unsqueeze(1)) * self._rates_RJ
        return gradient_RJ


def _mean_from_top(counts_RTK: Tensor, ks: tuple[int, ...]) -> Tensor:
    """Entry i is the mean over the given K of the probability of K - 1 - i arrivals."""
    size, total = max(ks), None
    for k in ks:
        flipped_RTK = counts_RTK[..., :k].flip(-1)
        term_RTK = F.pad(flipped_RTK, (k - flipped_RTK.shape[-1], size - k))
        total = term_RTK if total is None else total + term_RTK
    assert total is not None
    return total / len(ks)


def _hit(counts_RTK: Tensor, ks: tuple[int, ...]) -> Tensor:
    """The mean over the given K of the probability of fewer than K arrivals."""
    return torch.stack([counts_RTK[..., :k].sum(-1) for k in ks]).sum(0) / len(ks)
