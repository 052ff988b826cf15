"""metrics.py against values worked by hand, plain loops, and other implementations."""
import gzip
import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import relplot
import torch
from hypothesis import given, settings, strategies as st
from torchmetrics.functional import classification as tm

import metrics
from metrics import (accuracy_at_coverage, adaptive_ece, answers_match, auroc, bootstrap_interval, brier,
                     brier_decomposition, classwise_ece, ece, ece_floor, evaluate, fit_temperature,
                     maximum_calibration_error, nll, normalize_answer, plot_reliability, reliability_diagram, sem_ece,
                     semantic_confidence, smooth_ece)

BINNED = [ece, adaptive_ece, maximum_calibration_error]


def random_rows(rng, n=None):
    """Confidences of some shape, and correct drawn so that they are over- or underconfident."""
    n = n or int(rng.integers(1, 300))
    confidence = rng.beta(*rng.uniform(0.3, 4, 2), n)
    return confidence, rng.random(n) < confidence ** rng.uniform(0.3, 3)


def random_probabilities(rng, n, k, ragged=False):
    """(n, k) softmax rows and labels; ragged: between 3 and k options a row, the others have probability 0."""
    logits = rng.normal(size=(n, k)) * rng.uniform(0.5, 3)
    options = rng.integers(min(3, k), k + 1, n) if ragged else np.full(n, k)
    logits[np.arange(k) >= options[:, None]] = -np.inf
    p = torch.tensor(logits).softmax(-1).numpy()
    return p, np.array([rng.choice(k, p=row) for row in p]), logits


# --- Binned calibration errors -------------------------------------------------------------------

def test_case_08_confidence_zero_and_one_land_in_the_first_and_last_bin():
    assert ece([0.95, 1.0], [1, 0], 10) == pytest.approx(0.475)            # one bin: |0.975 - 0.5|
    assert ece([0.0, 0.05], [1, 0], 10) == pytest.approx(0.475)            # one bin: |0.025 - 0.5|
    assert ece([0.0, 1.0], [0, 1]) == 0
    assert ece([0.0, 1.0], [1, 0]) == 1
    for bins in (1, 2, 3, 7, 10, 15, 100):
        confidence = np.concatenate([np.arange(bins + 1) / bins, [0, 1, 1]])
        bin_of = metrics.equal_width(confidence, bins)
        assert bin_of.min() == 0 and bin_of.max() == bins - 1
        assert np.bincount(bin_of, minlength=bins).sum() == len(confidence)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_case_08_an_edge_belongs_to_the_bin_it_closes_in_every_precision(dtype):
    for bins in (2, 3, 7, 10, 15):
        edges = (np.arange(1, bins + 1) / bins).astype(dtype)
        assert metrics.equal_width(edges, bins).tolist() == list(range(bins))
        above = np.nextafter(edges[:-1], dtype(1))
        assert metrics.equal_width(above, bins).tolist() == list(range(1, bins))


@pytest.mark.parametrize("bins", [1, 5, 15])
@pytest.mark.parametrize("metric", BINNED)
def test_case_09_ties_share_a_bin(metric, bins):
    assert metric([0.7] * 5, [1, 0, 0, 1, 0], bins) == pytest.approx(0.3)


def test_case_09_equal_mass_bins_never_split_ties():
    # 6 rows, 2 bins: the first starts at 0.1, the second with the row that has three smaller ones: 0.9
    assert adaptive_ece([0.1, 0.5, 0.5, 0.9, 0.9, 0.9], [0, 1, 0, 1, 1, 0], 2) == pytest.approx((0.1 + 0.7) / 6)
    # the tie at 0.5 starts before the cut, so it stays below it, with four of six rows
    assert adaptive_ece([0.1, 0.5, 0.5, 0.5, 0.9, 0.9], [0, 1, 0, 0, 1, 1], 2) == pytest.approx((0.6 + 0.2) / 6)


@pytest.mark.parametrize("metric", [*BINNED, smooth_ece, auroc, brier_decomposition])
def test_case_09_empty_input_is_an_error(metric):
    with pytest.raises(ValueError, match="non-empty"):
        metric([], [])


def test_hand_worked_bins():
    confidence, correct = [0.25, 0.35, 0.65, 0.75, 0.85], [0, 1, 1, 0, 1]  # two bins of [0, 0.5], (0.5, 1]
    assert ece(confidence, correct, 2) == pytest.approx((0.4 + 0.25) / 5)  # |0.6 - 1| and |2.25 - 2|, summed over rows
    assert maximum_calibration_error(confidence, correct, 2) == pytest.approx(0.2)         # |0.3 - 0.5|
    assert adaptive_ece(confidence, correct, 5) == pytest.approx((0.25 + 0.65 + 0.35 + 0.75 + 0.15) / 5)
    assert adaptive_ece(confidence, correct, 500) == adaptive_ece(confidence, correct, 5)


def test_binned_errors_equal_torchmetrics_on_random_inputs():
    """Off the edges, where torchmetrics closes bins on the left and gives 1.0 a bin of its own."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        confidence, correct = random_rows(rng)
        bins = int(rng.integers(1, 30))
        c, y = torch.tensor(confidence), torch.tensor(correct).long()
        for metric, norm in ((ece, "l1"), (maximum_calibration_error, "max")):
            theirs = tm.binary_calibration_error(c, y, bins, norm, validate_args=False).item()
            assert metric(confidence, correct, bins) == pytest.approx(theirs, abs=1e-9)


def test_conf_ece_equals_torchmetrics_multiclass():
    rng = np.random.default_rng(1)
    for _ in range(100):
        p, labels, _ = random_probabilities(rng, int(rng.integers(1, 200)), int(rng.integers(2, 8)))
        theirs = tm.multiclass_calibration_error(torch.tensor(p), torch.tensor(labels), p.shape[1], 15).item()
        assert evaluate(p, labels, 15)["conf_ece"] == pytest.approx(theirs, abs=1e-6)   # they sum in float32


def test_adaptive_ece_equals_a_plain_loop_with_ties():
    rng = np.random.default_rng(2)
    for _ in range(1000):
        confidence, correct = random_rows(rng, int(rng.integers(1, 60)))
        confidence, bins = confidence.round(int(rng.integers(1, 4))), int(rng.integers(1, 12))
        n, groups = len(confidence), {}
        for c, y in sorted(zip(confidence, correct)):
            smaller = sum(other < c for other in confidence)
            groups.setdefault(smaller * bins // n, []).append(c - y)
        expected = sum(abs(sum(g)) for g in groups.values()) / n
        assert adaptive_ece(confidence, correct, bins) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 20))
@settings(max_examples=300, deadline=None)
def test_properties_of_the_binned_errors(rows, bins):
    """In [0, 1]; the largest is at least the mean; no finer than the bins can be; the order of rows is nothing."""
    confidence, correct = map(list, zip(*rows))
    bias = abs(np.mean(confidence) - np.mean(correct))
    finest = np.mean(np.abs(np.subtract(confidence, correct)))
    for metric in BINNED:
        value = metric(confidence, correct, bins)
        assert -1e-12 <= value <= 1 + 1e-12
        assert metric(confidence[::-1], correct[::-1], bins) == pytest.approx(value, abs=1e-12)
    for metric in (ece, adaptive_ece):                     # the triangle inequality, both ways
        assert bias - 1e-12 <= metric(confidence, correct, bins) <= finest + 1e-12
    assert ece(confidence, correct, bins) <= maximum_calibration_error(confidence, correct, bins) + 1e-12
    assert ece(confidence, correct, 1) == pytest.approx(bias, abs=1e-12)
    calibration, refinement = brier_decomposition(confidence, correct, bins)
    assert calibration + refinement == pytest.approx(np.mean(np.subtract(confidence, correct) ** 2), abs=1e-12)
    assert refinement >= 0 and calibration <= ece(confidence, correct, bins) + 1e-12


# --- Smooth ECE ----------------------------------------------------------------------------------

def smooth_ece_by_definition(confidence, correct, points=2000):
    """The fixed point with the reflected kernel as a sum over 18 mirror images, by the midpoint rule."""
    t = (np.arange(points) + 0.5)[:, None] / points
    images = np.concatenate([s * np.asarray(confidence) + 2 * k for k in range(-4, 5) for s in (1, -1)])
    residual = np.tile(np.subtract(confidence, correct), 18) / len(correct)

    def error(s):
        return abs(np.exp(-((t - images) / s) ** 2 / 2) @ residual / (s * math.sqrt(2 * math.pi))).mean()
    low, high = 0.0, 1.0
    for _ in range(20):
        s = (low + high) / 2
        low, high = (s, high) if error(s) > s else (low, s)
    return low


def test_smooth_ece_of_one_sign_is_the_mean_residual():
    """Smoothing moves mass but loses none: with residuals of one sign E(s) is |mean residual| at every s."""
    assert smooth_ece([0.9, 0.6, 0.8], [0, 0, 0]) == pytest.approx(2.3 / 3, abs=1e-6)
    assert smooth_ece([0.7] * 5, [1, 1, 0, 0, 0]) == pytest.approx(0.3, abs=1e-6)
    assert smooth_ece([1.0, 1.0], [0, 0]) == pytest.approx(1)
    assert smooth_ece([1.0, 0.0], [1, 0]) == 0
    assert smooth_ece([0.5, 0.5], [1, 0]) == 0


def test_smooth_ece_equals_its_definition():
    rng = np.random.default_rng(3)
    for _ in range(25):
        confidence, correct = random_rows(rng, int(rng.integers(2, 40)))
        assert smooth_ece(confidence, correct) == pytest.approx(smooth_ece_by_definition(confidence, correct), abs=1e-4)


def test_smooth_ece_equals_relplot():
    """To their bisection's last step, 1/1024. Confidences within a grid step of 0 and 1 are settled below."""
    rng = np.random.default_rng(4)
    for _ in range(500):
        confidence, correct = random_rows(rng, int(rng.integers(50, 1000)))
        confidence = 0.01 + 0.98 * confidence
        theirs = relplot.smECE(confidence, correct.astype(float))
        assert smooth_ece(confidence, correct) == pytest.approx(theirs, abs=1.5e-3)


def test_smooth_ece_counts_a_confidence_of_one_in_full():
    """Residuals 1, 1, -1/2, 1/2: the last two cancel where they stand, the first two are half of the rows. (At an
    end relplot takes the mirror image for the point itself, counts half the mass there, and says 0.333.)"""
    assert smooth_ece([1.0, 1.0, 0.5, 0.5], [0, 0, 1, 0]) == pytest.approx(0.5, abs=1e-6)
    assert smooth_ece([0.0, 0.0, 0.5, 0.5], [1, 1, 1, 0]) == pytest.approx(0.5, abs=1e-6)


# --- Ranking -------------------------------------------------------------------------------------

def test_auroc_counts_ties_half():
    assert auroc([0.9, 0.8, 0.3, 0.1], [1, 1, 0, 0]) == 1
    assert auroc([0.9, 0.8, 0.3, 0.1], [0, 0, 1, 1]) == 0
    assert auroc([0.5] * 4, [1, 0, 1, 0]) == 0.5
    assert auroc([0.9, 0.5, 0.5, 0.1], [1, 1, 0, 0]) == pytest.approx(3.5 / 4)
    assert math.isnan(auroc([0.2, 0.4], [1, 1])) and math.isnan(auroc([0.2, 0.4], [0, 0]))


def test_auroc_equals_torchmetrics_on_random_inputs_with_ties():
    rng = np.random.default_rng(5)
    for _ in range(1000):
        confidence, correct = random_rows(rng)
        confidence = confidence.round(int(rng.integers(1, 8)))
        if 0 < correct.sum() < len(correct):
            theirs = tm.binary_auroc(torch.tensor(confidence), torch.tensor(correct).long(), validate_args=False).item()
            assert auroc(confidence, correct) == pytest.approx(theirs, abs=1e-6)       # they sum in float32


def test_accuracy_at_coverage():
    confidence, correct = [0.9, 0.8, 0.6, 0.6, 0.6, 0.2], [1, 0, 1, 1, 0, 0]
    assert accuracy_at_coverage(confidence, correct, 1) == 0.5
    assert accuracy_at_coverage(confidence, correct, 1 / 6) == 1
    assert accuracy_at_coverage(confidence, correct, 0.01) == 1            # never fewer than one row
    assert accuracy_at_coverage(confidence, correct, 1e-12) == 1
    assert accuracy_at_coverage(confidence, correct, 2 / 6) == 0.5
    assert accuracy_at_coverage(confidence, correct, 0.5) == pytest.approx((1 + 2 / 3) / 3)     # one of three that tie
    assert accuracy_at_coverage(np.arange(100) / 100, np.arange(100) >= 93, 0.07) == 1          # 7 rows, not 8
    for coverage in (0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="coverage"):
            accuracy_at_coverage(confidence, correct, coverage)


def test_brier_decomposition_of_few_values_is_murphys():
    confidence, correct = [0.2] * 5 + [0.8] * 5, [0, 0, 0, 1, 1] + [1, 1, 1, 1, 1]
    calibration, refinement = brier_decomposition(confidence, correct)
    assert calibration == pytest.approx((0.2 ** 2 + 0.2 ** 2) / 2)
    assert refinement == pytest.approx(0.4 * 0.6 / 2)


# --- Probabilities and labels --------------------------------------------------------------------

def test_hand_worked_scores():
    p, labels = [[0.7, 0.2, 0.1], [0.3, 0.4, 0.3]], [0, 2]
    assert nll(p, labels) == pytest.approx(-(math.log(0.7) + math.log(0.3)) / 2)
    assert brier(p, labels) == pytest.approx((0.09 + 0.04 + 0.01 + 0.09 + 0.16 + 0.49) / 2)
    # 2 bins: class 0 {0.7; 1}, {0.3; 0}: 0.3 + 0.3; class 1 one bin: 0.6; class 2 one bin: |0.4 - 1| = 0.6
    assert classwise_ece(p, labels, 2) == pytest.approx((0.6 + 0.6 + 0.6) / 2 / 3)
    assert nll([[1.0, 0.0]], [1]) == math.inf
    assert nll([[1.0, 0.0]], [0]) == 0 and brier([[1.0, 0.0]], [1]) == 2
    assert classwise_ece([[1.0, 0.0], [1.0, 0.0]], [0, 1]) == 0.5          # one-hot rows, half of them wrong


def test_scores_equal_torch_on_random_ragged_inputs():
    rng = np.random.default_rng(6)
    for _ in range(300):
        p, labels, logits = random_probabilities(rng, int(rng.integers(1, 100)), int(rng.integers(2, 27)), ragged=True)
        z, y = torch.tensor(logits), torch.tensor(labels)
        assert nll(p, labels) == pytest.approx(torch.nn.functional.cross_entropy(z, y).item(), rel=1e-9)
        onehot = torch.nn.functional.one_hot(y, p.shape[1])
        assert brier(p, labels) == pytest.approx(((torch.tensor(p) - onehot) ** 2).sum(-1).mean().item(), rel=1e-9)


def test_classwise_ece_equals_torchmetrics_class_by_class():
    rng = np.random.default_rng(7)
    for _ in range(200):
        p, labels, _ = random_probabilities(rng, int(rng.integers(20, 200)), int(rng.integers(2, 7)))
        theirs = [tm.binary_calibration_error(torch.tensor(p[:, j]), torch.tensor(labels == j).long(), 15).item()
                  for j in range(p.shape[1])]
        assert classwise_ece(p, labels, 15) == pytest.approx(np.mean(theirs), abs=1e-9)


def test_case_10_nothing_depends_on_batching_padding_or_order():
    rng = np.random.default_rng(8)
    p, labels, _ = random_probabilities(rng, 90, 5, ragged=True)
    expected = evaluate(p, labels)
    order = rng.permutation(90)
    wider = [(np.pad(p, [(0, 0), (0, padding)]), labels) for padding in (1, 4, 21)]
    for rows, gold in [*wider, (p[order], labels[order])]:
        actual = evaluate(rows, gold)
        for name in expected:                              # the floor is simulated: another order, other draws
            assert actual[name] == pytest.approx(expected[name], abs=1e-2 if name == "ece_floor" else 1e-9)


@pytest.mark.parametrize("p, labels, message", [
    ([[0.5, 0.5], [1.2, -0.2]], [0, 1], "lie in"),
    ([[2.0, -1.0]], [0], "lie in"),                        # logits that sum to 1
    ([[-0.1, 1.1]], [0], "lie in"),
    ([[math.nan, 1.0]], [0], "lie in"),
    ([[math.inf, 0.0]], [0], "lie in"),
    ([[0.5, 0.5], [0.5, 0.4]], [0, 1], "row 1 sums to 0.9"),
    ([[0.6, 0.6]], [0], "sum to 1"),
    ([[0.0, 0.0]], [0], "sum to 1"),
    ([[0.5, 0.5]], [2], "labels"),
    ([[0.5, 0.5]], [-1], "labels"),
    ([[0.5, 0.5]], [0, 1], "labels"),
    ([[0.5, 0.5]], [0.0], "integers"),
    ([0.5, 0.5], [0, 1], "dimension"),
    ([], [], "non-empty"),
    ([["a", "b"]], [0], "numbers"),
])
def test_case_10_what_cannot_be_probabilities_is_an_error(p, labels, message):
    for function in (evaluate, classwise_ece, nll, brier):
        with pytest.raises(ValueError, match=message):
            function(p, labels)


@pytest.mark.parametrize("confidence, correct, message", [
    ([1.0000001], [1], "lie in"), ([-1e-9], [1], "lie in"), ([math.nan], [1], "lie in"), ([0.5], [2], "0 or 1"),
    ([0.5], [math.nan], "0 or 1"), ([0.5], [1, 0], "rows"), ([[0.5]], [[1]], "dimension"),
])
def test_case_10_what_cannot_be_confidences_is_an_error(confidence, correct, message):
    for function in (*BINNED, smooth_ece, auroc, brier_decomposition, reliability_diagram):
        with pytest.raises(ValueError, match=message):
            function(confidence, correct)
    for bins in (0, -1, 2.5):
        for function in (*BINNED, brier_decomposition, reliability_diagram):
            with pytest.raises(ValueError, match="bins"):
                function([0.5], [1], bins)


def test_float32_softmax_rows_of_any_width_pass():
    for k in (2, 26, 50_000):
        p = (torch.randn(8, k, generator=torch.Generator().manual_seed(k)) * 5).softmax(-1)
        assert nll(p, torch.zeros(8, dtype=torch.long)) > 0


def test_lists_arrays_and_tensors_give_the_same_floats():
    rng = np.random.default_rng(9)
    p, labels, _ = random_probabilities(rng, 50, 4)
    expected = evaluate(p, labels)
    assert evaluate(p.tolist(), labels.tolist()) == expected
    assert evaluate(torch.tensor(p, requires_grad=True), torch.tensor(labels, dtype=torch.int32)) == expected
    assert all(type(v) is float for name, v in expected.items() if name != "n") and expected["n"] == 50
    assert ece(torch.tensor([0.5, 0.75], dtype=torch.bfloat16), torch.tensor([True, False])) == 0.625
    single = evaluate(p.astype(np.float32), labels)
    assert all(single[name] == pytest.approx(expected[name], abs=1e-5) for name in expected)


def test_evaluate_is_the_row_of_the_single_functions():
    rng = np.random.default_rng(10)
    p, labels, _ = random_probabilities(rng, 200, 4)
    top, right = p.max(1), p.argmax(1) == labels
    assert evaluate(p, labels, 7) == {
        "n": 200, "accuracy": right.mean(), "conf_ece": ece(top, right, 7), "cw_ece": classwise_ece(p, labels, 7),
        "nll": nll(p, labels), "brier": brier(p, labels), "ada_ece": adaptive_ece(top, right, 7),
        "smooth_ece": smooth_ece(top, right), "mce": maximum_calibration_error(top, right, 7),
        "auroc": auroc(top, right), "confidence": top.mean(), "ece_floor": ece_floor(top, bins=7)}


# --- Temperature ---------------------------------------------------------------------------------

def test_case_12_temperature():
    logits, labels = [[2.0, 0.0]] * 4, [0, 0, 0, 1]
    T = fit_temperature(logits, labels)
    assert T == pytest.approx(2 / math.log(3), rel=1e-9) == pytest.approx(1.8205, abs=5e-5)
    before, after = (nll(torch.tensor(logits).div(t).softmax(-1), labels) for t in (1, T))
    assert before == pytest.approx(0.6269, abs=5e-5) and after == pytest.approx(0.5623, abs=5e-5)
    for dtype in (torch.float32, torch.bfloat16):
        assert fit_temperature(torch.tensor(logits, dtype=dtype), torch.tensor(labels)) == T


def test_case_12_temperature_is_the_minimum_on_random_ragged_logits():
    rng = np.random.default_rng(11)
    grid = np.geomspace(0.01, 100, 400)
    for _ in range(60):
        _, labels, logits = random_probabilities(rng, int(rng.integers(5, 60)), int(rng.integers(3, 9)), ragged=True)
        z, y = torch.tensor(logits * rng.uniform(0.2, 5)), torch.tensor(labels)
        loss = lambda t: torch.nn.functional.cross_entropy(z / t, y).item()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            T = fit_temperature(z, y)
        assert 0.01 <= T <= 100
        assert loss(T) <= min(map(loss, grid)) + 1e-12 and loss(T) <= loss(1.0)
        assert torch.equal((z / T).argmax(-1), z.argmax(-1))


def test_case_12_temperature_undoes_a_known_one():
    rng = np.random.default_rng(12)
    _, labels, logits = random_probabilities(rng, 20_000, 4)
    T = fit_temperature(logits, labels)                    # labels were drawn from softmax(logits)
    assert T == pytest.approx(1, abs=0.05)
    assert fit_temperature(3 * logits, labels) == pytest.approx(3 * T, rel=1e-9)
    assert fit_temperature(logits + rng.normal(size=(20_000, 1)) * 100, labels) == pytest.approx(T, rel=1e-6)


@pytest.mark.parametrize("logits, labels, bound", [
    ([[2.0, 0.0], [0.0, 1.0]], [0, 1], 0.01),              # all right: sharper is always better
    ([[2.0, 0.0], [0.0, 1.0]], [1, 0], 100),               # all wrong
    ([[1.0, 0.0], [1.0, 0.0]], [0, 1], 100),               # no skill: uniform is best
])
def test_case_12_a_bound_that_was_hit_is_reported(logits, labels, bound):
    with pytest.warns(UserWarning, match=f"bound {bound:g}"):
        assert fit_temperature(logits, labels) == bound


def test_case_12_nothing_to_fit_leaves_one_and_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_temperature([[0.5, 0.5, 0.5]], [1]) == 1
        assert fit_temperature([[0.0, -math.inf]], [0]) == 1
        assert fit_temperature([[math.log(3), 0]] * 4, [0, 0, 0, 1]) == pytest.approx(1)
        assert fit_temperature([[1e30, 0.0]] * 3 + [[0.0, 1e-30]], [0] * 4) == 1


@pytest.mark.parametrize("logits, labels, message", [
    ([[math.nan, 0.0]], [0], "NaN"), ([[math.inf, 0.0]], [0], "inf"), ([[-math.inf, 0.0]], [0], "-inf"),
    ([[1.0, 0.0]], [2], "labels"), ([[1.0, 0.0]], [0, 1], "labels"), ([1.0, 0.0], [0], "dimension"),
    ([], [], "non-empty"),
])
def test_fit_temperature_errors(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        fit_temperature(logits, labels)


# --- Chance --------------------------------------------------------------------------------------

@pytest.mark.parametrize("n, floor, tolerance", [(20, 0.236, 0.006), (200, 0.082, 0.003), (2000, 0.026, 0.001)])
def test_case_11_the_floor_of_a_calibrated_four_option_model(n, floor, tolerance):
    confidence = 1 / 4 + 3 / 4 * (np.arange(3000) + 0.5) / 3000            # the top of four is at least 1/4
    assert ece_floor(confidence, n, 15, trials=600) == pytest.approx(floor, abs=tolerance)


def test_case_11_the_floor_of_one_confidence_is_a_binomials_mean_deviation():
    # n = 4, p = 1/2: |2 - k| / 4 with k ~ Binomial(4, 1/2): (2 x 2 + 8 x 1) / 16 / 4
    assert ece_floor([0.5] * 4, trials=20_000) == pytest.approx(12 / 16 / 4, abs=0.003)
    assert ece_floor([0.0, 1.0, 1.0]) == 0
    assert ece_floor([0.3, 0.6], seed=1) == ece_floor([0.3, 0.6], seed=1)


def test_bootstrap_of_a_mean_covers_as_often_as_it_says():
    rng = np.random.default_rng(13)
    covered = 0
    for seed in range(300):
        low, high = bootstrap_interval(np.mean, rng.random(60) < 0.6, level=0.8, trials=200, seed=seed)
        covered += low <= 0.6 <= high
    assert 0.72 < covered / 300 < 0.88
    low, high = bootstrap_interval(np.mean, np.arange(400) % 2, trials=2000)
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.004)


def test_bootstrap_of_ece_holds_the_sample_and_zero_error_at_its_floor():
    rng = np.random.default_rng(14)
    confidence = rng.uniform(0.25, 1, 300)
    for _ in range(10):
        correct = rng.random(300) < confidence             # calibrated: resampled ECEs all lie above the sample's
        low, high = bootstrap_interval(ece, confidence, correct, trials=200)
        assert 0 <= low <= ece(confidence, correct) <= high


def test_bootstrap_is_deterministic_keeps_rows_together_and_checks_its_input():
    rng = np.random.default_rng(15)
    p, labels, _ = random_probabilities(rng, 80, 3)
    assert bootstrap_interval(nll, p, labels, trials=50) == bootstrap_interval(nll, torch.tensor(p), labels, trials=50)
    assert bootstrap_interval(nll, p, labels, trials=50) != bootstrap_interval(nll, p, labels, trials=50, seed=1)
    assert bootstrap_interval(lambda a, b: float((a == b).mean()), labels, labels, trials=50) == (1, 1)
    low, high = bootstrap_interval(lambda a, b: float((a - b).mean()), p[:, 0], p[::-1, 0], trials=50)
    assert low < 0 < high                                  # a difference may be negative
    assert all(map(math.isnan, bootstrap_interval(auroc, [0.2, 0.5], [1, 1], trials=10)))
    assert all(map(math.isnan, bootstrap_interval(nll, [[1.0, 0.0]] * 2, [0, 1], trials=10)))
    with pytest.raises(ValueError, match="same number of rows"):
        bootstrap_interval(nll, p, labels[1:])
    with pytest.raises(ValueError, match="level"):
        bootstrap_interval(nll, p, labels, level=95)


# --- Open-ended answers --------------------------------------------------------------------------

@pytest.mark.parametrize("prediction, gold, same", [
    ("B", "A", False), ("A", "A", True), ("a.", "A", True), ("", "A", False), ("A", "", False), ("", "", False),
    (" \n ", "x", False), ("The", "A", False), ("The", "the", True), ("Vitamin A", "vitamin", False),
    ("Plan A", "Plan B", False), ("A", "The A", True),
    ("Montre\u0301al", "Montr\u00e9al", True), ("Montreal", "Montr\u00e9al", False), ("x=\u0338y", "x\u2260y", True),
    ("10\n\nPassage: x", "10", True), ("\n 10\r\nmore", "10", True), ("10 and more", "10", False),
    ("the Lord of the Rings", "Lord of Rings", True), ("An apple", "apple", True), ("theatre", "atre", False),
    ("U.S.A.", "usa", True), ("O\u2019Neill", "O'Neill", True), ("  New   York ", "new york", True),
    ("new_york", "New York", True), ("STRASSE", "stra\u00dfe", True), ("+", "-", False), ("+", "+", True),
    ("\u6771\u4eac\u3002", "\u6771\u4eac", False), ("\u0130", "\u0130", True),
])
def test_case_17_answers(prediction, gold, same):
    assert answers_match(prediction, [gold]) is same
    assert answers_match(prediction, gold) is same         # one gold text need not be in a list


def test_case_17_any_alias_will_do():
    assert answers_match("the USA", ["United States", "U.S.A."])
    assert not answers_match("Canada", ["United States", "U.S.A."]) and not answers_match("x", [])


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_normalizing_twice_is_normalizing_once(text):
    once = normalize_answer(text)
    assert normalize_answer(once) == once
    assert once == once.strip() and "\n" not in once


def test_semantic_confidence_plugin():
    assert semantic_confidence(["x", "y", "x", "z"]) == ("x", 0.5)
    assert semantic_confidence([3, 3, 3]) == (3, 1.0)
    assert semantic_confidence([0, 0, 1]) == (0, 2 / 3)    # class 0 is a class
    assert semantic_confidence(torch.tensor([5, 5, 2])) == (5, 2 / 3)
    assert semantic_confidence(["y", "x"])[0] == "y"       # a tie: the first


def test_semantic_confidence_split_is_held_out():
    # a fair coin of two classes, n = 2: one sample picks, the other agrees or not
    assert semantic_confidence(["x", "y"], "split") == ("x", 0.0)
    assert semantic_confidence(["x"] * 7, "split") == ("x", 1.0)
    # x x y, halves of 1 and 2: x picks (2/3): share 1/2; y picks (1/3): share 0; on average 1/3
    assert semantic_confidence(["x", "x", "y"], "split", splits=20_000)[1] == pytest.approx(1 / 3, abs=0.01)
    assert semantic_confidence(["x", "x", "y"], "split") == semantic_confidence(["x", "x", "y"], "split")
    with pytest.raises(ValueError, match="1 sample"):
        semantic_confidence(["x"], "split")
    with pytest.raises(ValueError, match="0 sample"):
        semantic_confidence([])
    with pytest.raises(ValueError, match="estimator"):
        semantic_confidence(["x"], "median")


def test_split_removes_the_bias_of_plugin():
    """Samples of ten equally likely classes: the luckiest one's plug-in share is far above 1/10."""
    rng = np.random.default_rng(16)
    draws = [rng.integers(10, size=20).tolist() for _ in range(500)]
    plugin, split = (np.mean([semantic_confidence(d, e)[1] for d in draws]) for e in ("plugin", "split"))
    assert plugin > 0.18 and split == pytest.approx(0.1, abs=0.01)


def test_case_18_an_empty_generation_is_its_own_class():
    for empty in (None, ""):
        answer, confidence = semantic_confidence([empty, empty, "x"])
        assert answer is None and math.isnan(confidence)
        assert semantic_confidence([empty, "x", "x", "y"]) == ("x", 0.5)   # and has its share of the mass
        answer, confidence = semantic_confidence([empty] * 4, "split")
        assert answer is None and math.isnan(confidence)
    # x picked by two of three one-sample halves: the others are (x, None): 1/2; a half that picks None is left out
    assert semantic_confidence(["x", "x", None], "split", splits=200) == ("x", 0.5)


def test_case_18_class_masses_never_exceed_one():
    rng = np.random.default_rng(17)
    for _ in range(300):
        classes = [None if c == 0 else c for c in rng.integers(4, size=int(rng.integers(2, 9))).tolist()]
        for estimator in ("plugin", "split"):
            answer, confidence = semantic_confidence(classes, estimator)
            assert math.isnan(confidence) or 0 <= confidence <= 1
        if answer is not None:
            shares = {c: classes.count(c) / len(classes) for c in classes}
            assert sum(shares.values()) == pytest.approx(1)
            assert semantic_confidence(classes)[1] == max(shares.values())


def test_case_18_sem_ece_counts_the_missing():
    samples = [["x", "x", "y", "y", "x"], ["u", "u", "u", "v", "v"], [None, None, None, "x", "x"]]
    row = sem_ece(samples, ["x", ["w", "v"], "x"])
    assert row == {"n": 3, "accuracy": 1 / 3, "confidence": pytest.approx(0.6),
                   "sem_ece": pytest.approx(abs(1.2 - 1) / 2), "missing": 1}   # one bin: 0.6, 0.6 and one of two right
    row = sem_ece([[None, None]], ["x"])
    assert row["accuracy"] == 0 and row["missing"] == 1 and math.isnan(row["sem_ece"])
    assert sem_ece([[None, "x", None]], [None])["accuracy"] == 0           # empty is wrong, whatever the gold
    with pytest.raises(ValueError, match="equally many"):
        sem_ece(samples, ["x"])


def test_sem_ece_does_not_depend_on_batching():
    rng = np.random.default_rng(18)
    samples, golds = rng.integers(3, size=(40, 10)).tolist(), rng.integers(3, size=40).tolist()
    whole = [semantic_confidence(s, "split") for s in samples]
    confidence, correct = [c for _, c in whole], [a == g for (a, _), g in zip(whole, golds)]
    row = sem_ece(samples, golds, "split")
    assert row["sem_ece"] == ece(confidence, correct) and row["accuracy"] == np.mean(correct)


# --- Diagrams and the command --------------------------------------------------------------------

def test_answers_are_grouped_by_what_they_mean():
    """Once normalised, by the file's aliases, or by a user's same_answer; an empty one is no class (case 18)."""
    golds = ["Rome", "Roma"]
    assert metrics.group_answers(["the rome.", "Roma", "Paris", "", "paris!", "Oslo", " "], golds) == ["Rome", "Rome", "Paris", None, "Paris", "Oslo", None]
    assert metrics.group_answers(["b", "B", "a"]) == ["b", "b", "a"]
    first_letter = lambda a, b: a[0].lower() == b[0].lower()
    assert metrics.group_answers(["rust", "Paris", "pine", "oak"], golds, first_letter) == ["Rome", "Paris", "Paris", "oak"]
    assert metrics.group_answers([], golds) == [] and metrics.group_answers(["Rome"], ["Oslo"]) == ["Rome"]


def test_case_18_command_reads_open_answers_beside_options(tmp_path, capsys):
    """Two of three samples are right; two of two are wrong; all are empty: wrong, and without a confidence."""
    path, samples = tmp_path / "p.jsonl", [["x", "x", "y"], ["y", "y", None], [None, None, None]]
    rows = [{"method": "m", "domain": "d", "classes": classes, "choice": "ignored", "confidence": 0.1, "gold": "x"} for classes in samples]
    path.write_text(GOOD + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    metrics.main([str(path), "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.png")])
    options, answers = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert options["n"] == 1 and answers["n"] == 3 and answers["missing"] == 1
    assert answers["accuracy"] == pytest.approx(1 / 3) and answers["confidence"] == pytest.approx(2 / 3)
    assert answers["sem_ece"] == pytest.approx(abs(2 / 3 - 1 / 2))
    split = sem_ece(samples, ["x"] * 3, "split")
    assert answers["sem_ece_split"] == pytest.approx(split["sem_ece"]) and answers["sem_ece_low"] <= answers["sem_ece"] <= answers["sem_ece_high"]
    out = capsys.readouterr().out
    assert "sem_ece_split" in out and "cw_ece" in out and out.count("m, d") == 2
    path.write_text(json.dumps({**rows[0], "classes": [None]}) + "\n", encoding="utf-8")
    metrics.main([str(path)])                              # nothing to draw
    for bad in ({"classes": [], "gold": "x"}, {"classes": "x", "gold": "x"}, {"classes": [{}], "gold": "x"}, {"classes": ["x"], "gold": {}},
                {"classes": [[{}]], "gold": 1}, {"classes": [[["x"]]], "gold": "x"}):
        path.write_text(json.dumps(bad), encoding="utf-8")
        assert metrics.main([str(path)]) == 2
        assert "line 1: classes must be" in capsys.readouterr().err


def test_reliability_diagram_as_text():
    confidence, correct = [0.0, 1.0, 1.0, 0.7, 0.7], [1, 0, 1, 1, 1]
    assert reliability_diagram(confidence, correct, 5, "two bad ends", 10).splitlines() == [
        "two bad ends",
        "bin               n   conf    acc   - overconfident, + underconfident",
        "[0.00, 0.20]      1  0.000  1.000   ++++++++++",
        "(0.20, 0.40]      0",
        "(0.40, 0.60]      0",
        "(0.60, 0.80]      2  0.700  1.000   =======+++",
        "(0.80, 1.00]      2  1.000  0.500   =====-----",
        "n = 5, ECE = 0.5200"]                             # (1 + 2 x 0.3 + 2 x 0.5) / 5
    assert not reliability_diagram(confidence, correct).startswith("\n")


def test_reliability_diagram_counts_every_row():
    rng = np.random.default_rng(19)
    confidence, correct = random_rows(rng, 500)
    lines = reliability_diagram(confidence.astype(np.float16), correct, 15).splitlines()[1:-1]
    assert len(lines) == 15 and sum(int(line[13:19]) for line in lines) == 500


def predictions(tmp_path, n=60):
    rng = np.random.default_rng(20)
    p, labels, _ = random_probabilities(rng, n, 5, ragged=True)
    rows = [{"id": i, "method": "calm" if i % 3 else "ts", "domain": "ood", "gold": int(y), "choice": int(row.argmax()),
             "probabilities": [x for x in row.tolist() if x]} for i, (row, y) in enumerate(zip(p, labels))]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path, rows, p, labels


def test_command_recomputes_the_row_of_every_method(tmp_path, capsys):
    path, rows, p, labels = predictions(tmp_path)
    metrics.main([str(path), "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.png"), "--bins", "5"])
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [row["method"] for row in written] == ["ts", "calm"]
    for row, which in zip(written, (np.arange(60) % 3 == 0, np.arange(60) % 3 > 0)):
        expected = evaluate(p[which], labels[which], 5)
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-9)
        assert row["domain"] == "ood" and row["conf_ece_low"] <= row["conf_ece"] <= row["conf_ece_high"]
        assert f"n = {which.sum()}, ECE = {row['conf_ece']:.4f}" in out and f"{row['smooth_ece']:.4f}" in out
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def test_command_reads_gzip_byte_order_marks_and_crlf_alike(tmp_path, capsys):
    path, *_ = predictions(tmp_path)
    plain = path.read_bytes()
    outputs = []
    for name, data in (("a", plain), ("b.gz", gzip.compress(plain)), ("c", b"\xef\xbb\xbf" + plain),
                       ("d", plain.replace(b"\n", b"\r\n")), ("e", plain + b"\n")):
        (tmp_path / name).write_bytes(data)
        metrics.main([str(tmp_path / name)])
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1


def test_command_keeps_seeds_apart_and_takes_several_right_classes(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    rows = [{"method": "m", "seed": seed, "domain": "d", "classes": [seed, seed], "gold": gold} for seed, gold in ((1, 1), (2, [1, 2]), (3, 1))]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert metrics.main([str(path), "--json", str(tmp_path / "o.json")]) == 0
    saved = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert [(row["seed"], row["n"], row["accuracy"]) for row in saved] == [("1", 1, 1.0), ("2", 1, 1.0), ("3", 1, 0.0)]
    assert "m, d, seed 2" in capsys.readouterr().out
    path.write_text(json.dumps(rows[0]))
    assert metrics.main([str(path), "--json", str(tmp_path / "o.json")]) == 0
    assert "seed" not in json.loads((tmp_path / "o.json").read_text())["rows"][0]


def test_command_writes_strict_json_for_undefined_values(tmp_path, capsys):
    path = tmp_path / "p.jsonl"                            # all right: no AUROC; all wrong: infinite NLL
    path.write_text('{"file": "x", "probabilities": [1, 0], "choice": 0, "gold": 0}\n'
                    '{"file": "y", "probabilities": [1, 0], "choice": 0, "gold": 1}\n')
    metrics.main([str(path), "--json", str(tmp_path / "o.json")])
    right, wrong = json.loads((tmp_path / "o.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert right["auroc"] is None and right["nll"] == 0 and wrong["nll"] is None and wrong["domain"] == "y"


GOOD = '{"method": "m", "domain": "d", "probabilities": [0.6, 0.4], "choice": 0, "gold": 1}\n'


@pytest.mark.parametrize("line, message", [
    ("{", "line 2"), ("[1]", "JSON object"), ('{"probabilities": [1.0], "gold": 0}', "choice"),
    (GOOD.replace("0.6", "0.7"), "sum to 1"), (GOOD.replace("0.6", "NaN"), "lie in"),
    (GOOD.replace("0.6", '"0.6"'), "numbers"),
    (GOOD.replace("0.6, 0.4", ""), "non-empty"), (GOOD.replace("[0.6, 0.4]", "3"), "dimension"),
    (GOOD.replace("[0.6, 0.4]", "null"), "numbers"), (GOOD.replace('"gold": 1', '"gold": 2'), "gold must be"),
    (GOOD.replace('"gold": 1', '"gold": true'), "gold must be"),
    (GOOD.replace('"choice": 0', '"choice": "A"'), "choice must be"),
    (GOOD.replace('"choice": 0', '"choice": 1'), "most probable"), ("\udcff", "line 2"),
])
def test_command_on_bad_input_says_file_and_line_and_writes_nothing(tmp_path, capsys, line, message):
    path = tmp_path / "p.jsonl"
    path.write_bytes((GOOD + line + "\n").encode("utf-8", "surrogateescape"))
    code = metrics.main([str(path), "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.png")])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1
    assert f"{path}, line 2" in err and message in err
    assert [f.name for f in tmp_path.iterdir()] == ["p.jsonl"]


def test_command_on_missing_empty_cut_or_misused_files(tmp_path, capsys):
    good, empty, cut = (tmp_path / name for name in ("good", "empty", "cut.gz"))
    good.write_text(GOOD)
    empty.write_text("\n")
    cut.write_bytes(gzip.compress(GOOD.encode() * 50)[:-9])
    for arguments, message in (([tmp_path / "none"], "none"), ([empty], "no predictions"), ([cut], "cut.gz"),
                               ([tmp_path], str(tmp_path)), ([good, "--bins", 0], "bins")):
        code = metrics.main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert code == 2 and out == "" and err.count("\n") == 1 and message in err


def test_command_runs_as_a_script(tmp_path):
    path, *_ = predictions(tmp_path)
    run = subprocess.run([sys.executable, metrics.__file__, path], capture_output=True, text=True, check=True)
    assert "conf_ece" in run.stdout and "n = 40, ECE" in run.stdout


def test_plots_name_the_package_they_need(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib"):
        plot_reliability([("a", [0.5], [1])], tmp_path / "a.png")
