"""Is a model as often right as it says? The measures of calibration, and the temperature fit.

A prediction is a *confidence* in [0, 1] and whether it was *correct*. The file goes from there:
(1) what input is accepted, (2) confidence against accuracy in bins, and without bins,
(3) probabilities of all options against labels, (4) the temperature that lowers the NLL most,
(5) how much of a measured error is chance, (6) open-ended answers, whose confidence is the share
of samples that mean the same, (7) the row and the diagrams that are printed, (8) the command line:
`python metrics.py PREDICTIONS` computes all of it again from a file of predictions.

Arrays are lists, numpy arrays or torch tensors; results are Python floats. Every function looks
at all rows at once, so a result cannot depend on how the data were batched.
"""
import argparse
import collections
import gzip
import io
import itertools
import json
import math
import os
import re
import signal
import string
import sys
import unicodedata
import warnings
import zlib
from pathlib import Path

if __name__ == "__main__":                                 # importing torch takes seconds: Ctrl-C is no traceback there
    at_ctrl_c = signal.signal(signal.SIGINT, lambda *_: os._exit(os.write(2, b"\nmetrics.py: interrupted\n") and 130))

import numpy as np
import torch

TEMPERATURES = (0.01, 100.0)                               # the bounds of a fitted temperature


# --- 1. What input is accepted -------------------------------------------------------------------
# Probabilities are never told from logits by their values: a function takes one or the other, and
# what cannot be a probability is an error. Values keep their precision until they are binned.

def as_array(x):
    """List, array or tensor -> numpy array; bfloat16, which numpy lacks, as float32."""
    if torch.is_tensor(x):
        x = x.detach().cpu()
        x = x.float() if x.dtype == torch.bfloat16 else x
    return np.asarray(x)


def as_probabilities(x, name, dimensions):
    """-> floats in [0, 1], or a ValueError."""
    x = as_array(x)
    if x.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be numbers, not {x.dtype}")
    x = x if x.dtype.kind == "f" else x.astype(float)
    if x.ndim != dimensions or not x.size:
        raise ValueError(f"{name} must be a non-empty array of {dimensions} dimension(s), not of shape {x.shape}")
    if not ((x >= 0) & (x <= 1)).all():                    # NaN is neither
        raise ValueError(f"{name} must lie in [0, 1], but one is {x[~((x >= 0) & (x <= 1))][0]}")
    return x


def check_confidence(confidence, correct):
    """-> confidence (n,) of floats in [0, 1], correct (n,) of 0. and 1., or a ValueError."""
    confidence, correct = as_probabilities(confidence, "confidence", 1), as_array(correct)
    if correct.shape != confidence.shape:
        raise ValueError(f"confidence has {len(confidence)} rows, correct has shape {correct.shape}")
    if not np.isin(correct, (0, 1)).all():
        raise ValueError("correct must be 0 or 1 (or False, True) in every row")
    return confidence, correct.astype(float)


def check_probabilities(probabilities, labels):
    """-> probabilities (n, k), rows that sum to 1 within 1e-3, and labels (n,) in 0..k-1, or a ValueError.

    The tolerance passes softmax rows in float32 and values written with four decimals. Questions
    with fewer than k options are padded with probability 0.
    """
    probabilities, labels = as_probabilities(probabilities, "probabilities", 2), as_array(labels)
    total = probabilities.sum(1, dtype=float)
    if (abs(total - 1) > 1e-3).any():
        row = int(np.argmax(abs(total - 1)))
        raise ValueError(f"probabilities must sum to 1 in every row, but row {row} sums to {total[row]:.6g}")
    check_labels(labels, *probabilities.shape)
    return probabilities, labels


def check_labels(labels, n, k):
    """ValueError unless labels are n whole numbers in 0..k-1."""
    if labels.shape != (n,) or labels.dtype.kind not in "iu":
        raise ValueError(f"labels must be {n} integers, one a row, not {labels.dtype} of shape {labels.shape}")
    if labels.min() < 0 or labels.max() >= k:
        raise ValueError(f"labels must lie in 0..{k - 1}, but they reach from {labels.min()} to {labels.max()}")


# --- 2. Confidence against accuracy --------------------------------------------------------------

def equal_width(confidence, bins):
    """(n,) -> the bin of each row. Bins are right-closed: [0, 1/bins], (1/bins, 2/bins], ..., and 0 is in the first.

    Edges are rounded to the precision of `confidence`, so that 0.3 is on the edge 3/10 in float32 too.
    """
    check_bins(bins)
    edges = (np.arange(1, bins) / bins).astype(confidence.dtype)
    return np.searchsorted(edges, confidence)


def check_bins(bins):
    """ValueError unless `bins` is a whole number from 1."""
    if not isinstance(bins, (int, np.integer)) or bins < 1:
        raise ValueError(f"bins must be a whole number from 1, not {bins!r}")


def gap_of_row(bin_of, confidence, correct):
    """The bin of each row (n,) -> mean confidence - accuracy of that bin, again for each row (n,)."""
    return (np.bincount(bin_of, confidence - correct) / np.maximum(np.bincount(bin_of), 1))[bin_of]


def ece(confidence, correct, bins=10):
    """Expected calibration error: sum over bins of n_b/n |mean confidence - accuracy|, a probability.

    confidence (n,) in [0, 1], correct (n,) of 0 and 1; equal-width bins on [0, 1], right-closed, 0 in
    the first. ValueError on anything else. Naeini et al., AAAI 2015; Guo et al., ICML 2017, eq. 3.
    """
    confidence, correct = check_confidence(confidence, correct)
    return float(abs(gap_of_row(equal_width(confidence, bins), confidence, correct)).mean())


def adaptive_ece(confidence, correct, bins=10):
    """The same with bins of equal mass (Nixon et al., 2019, arXiv 1904.01685).

    The row with r smaller confidences goes into bin floor(r bins / n), so equal confidences share a
    bin always and, without ties, bin sizes differ by one at most.
    """
    confidence, correct = check_confidence(confidence, correct)
    check_bins(bins)
    smaller = np.searchsorted(np.sort(confidence), confidence)             # (n,) number of smaller ones
    return float(abs(gap_of_row(smaller * bins // len(confidence), confidence, correct)).mean())


def maximum_calibration_error(confidence, correct, bins=10):
    """The largest |mean confidence - accuracy| of the equal-width bins that hold a row (Guo et al., 2017, eq. 5)."""
    confidence, correct = check_confidence(confidence, correct)
    return float(abs(gap_of_row(equal_width(confidence, bins), confidence, correct)).max())


def smooth_ece(confidence, correct):
    """Smooth ECE (Blasiok & Nakkiran, 2023, arXiv 2309.12236): no bins, and the bandwidth picks itself.

    Smooth the residuals r_i = confidence_i - correct_i over [0, 1] with a Gaussian of width s that is
    reflected at both ends; E(s) = integral of |1/n sum_i r_i K_s(confidence_i, t)| dt falls with s, and
    the smooth ECE is the fixed point s = E(s). A reflected Gaussian is the heat kernel of an interval
    with closed ends: it multiplies the k-th cosine coefficient by exp(-(k pi s)^2 / 2). Confidences are
    rounded to a grid of 4,096 cells.
    """
    confidence, correct = check_confidence(confidence, correct)
    cells = 4096
    cell = np.minimum((confidence * cells).astype(int), cells - 1)
    residual = np.bincount(cell, confidence - correct, cells) / len(cell)
    spectrum = np.fft.rfft(np.concatenate([residual, residual[::-1]]))     # of the mirrored residuals: cosines
    frequency = np.pi * np.arange(cells + 1)
    low, high = 0.0, 1.0                                   # E(0) >= 0 and E(1) <= 1: bisect E(s) - s
    for _ in range(25):
        s = (low + high) / 2
        smoothed = np.fft.irfft(spectrum * np.exp(-(frequency * s) ** 2 / 2))[:cells]
        error = abs(smoothed).sum()                        # E(s)
        low, high = (s, high) if error > s else (low, s)
    return float(error)


def brier_decomposition(confidence, correct, bins=10):
    """(calibration, refinement): exactly two parts of mean (confidence - correct)^2, the confidence's Brier score.

    calibration = sum over equal-width bins of n_b/n (mean confidence - accuracy)^2. refinement = the Brier
    score left when each bin's confidences are shifted by its gap; where a bin holds one value only, this is
    the usual sum of n_b/n accuracy (1 - accuracy) of Murphy, 1973.
    """
    confidence, correct = check_confidence(confidence, correct)
    gap = gap_of_row(equal_width(confidence, bins), confidence, correct)
    return float((gap ** 2).mean()), float(((confidence - gap - correct) ** 2).mean())


def auroc(confidence, correct):
    """P(a right row is more confident than a wrong one), ties counting half; NaN if there are not both.

    It says whether confidence separates right from wrong, which ECE does not see: a constant
    confidence equal to the accuracy has ECE 0 and AUROC 1/2. Hanley & McNeil, 1982.
    """
    confidence, correct = check_confidence(confidence, correct)
    right, wrong = confidence[correct == 1], np.sort(confidence[correct == 0])
    if not len(right) or not len(wrong):
        return math.nan
    below, upto = np.searchsorted(wrong, right, "left"), np.searchsorted(wrong, right, "right")
    return float((below + upto).mean() / (2 * len(wrong)))


def accuracy_at_coverage(confidence, correct, coverage):
    """Accuracy on the ceil(coverage n) most confident rows; 0 < coverage <= 1, else a ValueError.

    Of rows that tie at the threshold every choice is equally likely: they count with their mean.
    Selective classification: Geifman & El-Yaniv, NeurIPS 2017.
    """
    confidence, correct = check_confidence(confidence, correct)
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must lie in (0, 1], not {coverage}")
    kept = max(1, math.ceil(round(coverage * len(confidence), 9)))         # 0.07 x 100 is 7.000000000000001
    threshold = np.sort(confidence)[-kept]
    above, tied = confidence > threshold, confidence == threshold
    return float((correct[above].sum() + (kept - above.sum()) * correct[tied].mean()) / kept)


# --- 3. Probabilities against labels -------------------------------------------------------------

def classwise_ece(probabilities, labels, bins=10):
    """Class-wise ECE: the mean over classes j of ece(probabilities[:, j], labels == j), a probability.

    probabilities (n, k), labels (n,). A class that no row gives probability to and no label names is
    padding and not counted, so the width of the padding changes nothing. Kull et al., NeurIPS 2019.
    """
    probabilities, labels = check_probabilities(probabilities, labels)
    return float(np.mean([ece(p, labels == j, bins) for j, p in enumerate(probabilities.T)
                          if p.any() or (labels == j).any()]))


def nll(probabilities, labels):
    """Mean of -log probability of the label, in nats; infinite if a label had probability 0."""
    probabilities, labels = check_probabilities(probabilities, labels)
    with np.errstate(divide="ignore"):
        return float(-np.log(probabilities[np.arange(len(labels)), labels].astype(float)).mean())


def brier(probabilities, labels):
    """Mean over rows of the sum over classes of (probability - [class is the label])^2, from 0 to 2 (Brier, 1950)."""
    probabilities, labels = check_probabilities(probabilities, labels)
    difference = probabilities.astype(float)
    difference[np.arange(len(labels)), labels] -= 1
    return float((difference ** 2).sum(1).mean())


# --- 4. Temperature ------------------------------------------------------------------------------

def fit_temperature(logits, labels):
    """T > 0 that minimises the NLL of softmax(logits / T) (Guo et al., ICML 2017, section 4.2).

    logits (n, k), -inf where a question has no such option; labels (n,). The NLL is convex in b = 1/T
    with slope mean(E_p[z] - z_label) and curvature mean(Var_p[z]), so T comes from Newton's method with
    bisection, in float64, over T in [0.01, 100]; it is never worse than T = 1, and warns if it is one of the bounds.
    ValueError on NaN, +inf, or a label whose logit is -inf.
    """
    z, labels = as_array(logits), as_array(labels)
    if z.ndim != 2 or not z.size:
        raise ValueError(f"logits must be a non-empty array of 2 dimensions, not of shape {z.shape}")
    check_labels(labels, *z.shape)
    if np.isnan(z).any() or np.isposinf(z).any() or np.isneginf(z[np.arange(len(z)), labels]).any():
        raise ValueError("logits must not be NaN or +inf, and a label's logit not -inf")
    parts = np.array_split(np.arange(len(z)), -(-z.size // 2 ** 22))       # logits over a vocabulary: some rows at a time

    def derivatives(b):                                    # the NLL, its slope and its curvature, the variance of z
        sums = np.zeros(3)
        for rows in parts:
            x, y = z[rows].astype(float), labels[rows]
            x -= x.max(1, keepdims=True)                   # (rows, k), at most 0
            p, right = np.exp(b * x), x[np.arange(len(x)), y]
            total = p.sum(1)
            x[np.isneginf(x)] = 0                          # an absent option has p = 0: it must not make 0 x inf
            mean, square = np.einsum("nk,nk->n", p, x) / total, np.einsum("nk,nk,nk->n", p, x, x) / total
            sums += [(np.log(total) - b * right).sum(), (mean - right).sum(), (square - mean ** 2).sum()]
        return sums / len(z)

    low, high, b = 1 / TEMPERATURES[1], 1 / TEMPERATURES[0], 1.0      # of b
    for step in itertools.count(1):                        # Newton's, but every third bisects, in the logarithm
        _, slope, curvature = derivatives(b)
        low, high = (b, high) if slope < 0 else (low, b)
        newton = b - slope / curvature if curvature > 0 else math.inf
        if high / low < 1 + 1e-12 or abs(newton - b) < 1e-12 * b:
            break
        b = newton if step % 3 and low < newton < high else math.sqrt(low * high)
    if not derivatives(b)[0] < derivatives(1.0)[0]:
        return 1.0
    for bound in TEMPERATURES:
        if math.isclose(1 / b, bound, rel_tol=1e-9):
            warnings.warn(f"the fitted temperature is the bound {bound:g}: the NLL still falls there", stacklevel=2)
            return bound
    return 1 / b


# --- 5. How much of it is chance -----------------------------------------------------------------

def ece_floor(confidence, n=None, bins=10, trials=200, seed=0):
    """The mean ECE that a perfectly calibrated model with these confidences shows: noise, not miscalibration.

    confidence (m,); each of `trials` draws correct ~ Bernoulli(confidence). With n, each trial also draws
    n of the confidences, with replacement: the floor at another sample size.
    """
    confidence = as_probabilities(confidence, "confidence", 1)
    rng = np.random.default_rng(seed)
    total = 0
    for _ in range(trials):
        drawn = confidence if n is None else rng.choice(confidence, n)
        total += ece(drawn, rng.random(len(drawn)) < drawn, bins)
    return total / trials


def bootstrap_interval(metric, *arrays, level=0.95, trials=1000, seed=0):
    """(low, high) for metric(*arrays), from resampling the rows with replacement.

    Resampling adds noise, and ECE counts noise as error: its resampled values lie above the sample's own.
    So the quantiles are shifted until the resampled values' mean is the sample's value (for a mean, such as
    accuracy or NLL, hardly at all); a metric that was never negative keeps low at 0 or above. The interval is
    for the ECE measured *at this n*: compare it with `ece_floor`. Resamples without a finite value are
    left out, a sample without one has (NaN, NaN). Efron & Tibshirani, 1993, chapters 10 (bias) and 13 (percentiles).
    """
    arrays = [as_array(a) for a in arrays]
    n = len(arrays[0])
    if not n or any(len(a) != n for a in arrays):
        raise ValueError(f"arrays must have the same number of rows, at least one, not {[len(a) for a in arrays]}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), not {level}")
    rng = np.random.default_rng(seed)
    picks = (rng.integers(n, size=n) for _ in range(trials))
    values = np.array([metric(*(a[pick] for a in arrays)) for pick in picks])
    values, value = values[np.isfinite(values)], metric(*arrays)
    if not len(values) or not math.isfinite(value):
        return math.nan, math.nan
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2]) - values.mean() + value
    return float(max(low, 0) if values.min() >= 0 else low), float(high)


# --- 6. Open-ended answers -----------------------------------------------------------------------

PUNCTUATION = string.punctuation + "\u2018\u2019\u201c\u201d\u00b4"         # and curly quotes, the acute accent


def normalize_answer(text):
    """Text -> what of it counts when answers are compared.

    As SQuAD (Rajpurkar et al., 2016) and TriviaQA (Joshi et al., 2017) do it: no case, punctuation,
    articles or surplus space. Besides: composed Unicode (NFC), and the first line only, for models that
    go on after the answer. Only an article before another word goes, so that the answers "A" and
    "Vitamin A" keep theirs; an answer of punctuation alone keeps it.
    """
    text = unicodedata.normalize("NFC", text).strip()
    text = text.splitlines()[0].casefold().replace("_", " ") if text else ""
    text = "".join(c for c in text if c not in PUNCTUATION).strip() or text
    text = re.sub(r"\b(a|an|the)\s+(?=\w)", "", text)
    return unicodedata.normalize("NFC", " ".join(text.split()))


def answers_match(prediction, golds):
    """Whether the text equals one of the gold texts (a string or a list of them) once normalised; "" equals nothing."""
    golds = [golds] if isinstance(golds, str) else golds
    prediction = normalize_answer(prediction)
    return prediction != "" and prediction in map(normalize_answer, golds)


def modal(classes):
    """The most frequent class; of those that tie, the one met first."""
    return collections.Counter(classes).most_common(1)[0][0]


def semantic_confidence(classes, estimator="plugin", splits=10, seed=0):
    """Samples of one answer, grouped by meaning -> (modal class, confidence). Wang et al., 2026, arXiv 2605.08432.

    classes: n hashable class ids, equal where two samples mean the same; None (or "") for an empty
    generation, a class of its own. "plugin": the modal class's share of all samples - which flatters, as
    choice and confidence come from the same samples. "split": the modal class of a random half and its share
    in the *other* half, averaged over `splits` halvings. Where the modal class is the empty one, there is no
    answer to be confident in: (None, NaN); a half of which this is true is left out.
    """
    classes = classes.tolist() if torch.is_tensor(classes) else classes
    classes = [None if isinstance(c, str) and c == "" else c for c in classes]
    if estimator not in ("plugin", "split"):
        raise ValueError(f"estimator must be 'plugin' or 'split', not {estimator!r}")
    if len(classes) < (2 if estimator == "split" else 1):
        raise ValueError(f"estimator {estimator!r} cannot work with {len(classes)} sample(s)")
    answer = modal(classes)
    if answer is None:
        return None, math.nan
    if estimator == "plugin":
        return answer, classes.count(answer) / len(classes)
    rng = np.random.default_rng(seed)                      # the same halvings for every question
    half, hits, seen = len(classes) // 2, 0, 0
    for _ in range(splits):
        shuffled = [classes[i] for i in rng.permutation(len(classes))]
        choice = modal(shuffled[:half])
        if choice is not None:
            hits, seen = hits + shuffled[half:].count(choice), seen + len(classes) - half
    return answer, hits / seen if seen else math.nan


def group_answers(samples, golds=(), same_answer=answers_match):
    """n sampled texts -> n classes for `semantic_confidence`, None for an empty text.

    same_answer(a, b) says whether two texts mean the same; the default compares them once normalised, yours may ask a
    model. A sample that means any of `golds`, the accepted answers, is in the class golds[0]; any other is in the class
    of the first sample before it that it means the same as, and a class is called by its first text.
    """
    classes = []
    for text in samples:
        if not normalize_answer(text):
            classes.append(None)
        elif any(same_answer(text, gold) for gold in golds):
            classes.append(golds[0])
        else:
            others = (c for c in dict.fromkeys(classes) if c is not None and c not in golds)
            classes.append(next((c for c in others if same_answer(text, c)), text))
    return classes


def modal_answers(samples, golds, estimator="plugin", splits=10, seed=0):
    """Arguments as for `sem_ece` -> confidence and correctness, (m,) each, of the m questions that have a confidence; and
    of all n questions whether the modal class is right, a list."""
    if not len(samples) or len(samples) != len(golds):
        raise ValueError(f"samples and golds must be equally many, at least one, not {len(samples)} and {len(golds)}")
    answers = [semantic_confidence(classes, estimator, splits, seed) for classes in samples]
    golds = [gold if isinstance(gold, (list, tuple, set, frozenset)) else [gold] for gold in golds]
    right = [answer is not None and answer in gold for (answer, _), gold in zip(answers, golds)]
    known = [i for i, (_, c) in enumerate(answers) if not math.isnan(c)]
    return np.array([answers[i][1] for i in known]), np.array([right[i] for i in known]), right


def sem_ece(samples, golds, estimator="plugin", bins=10, splits=10, seed=0):
    """Sem-ECE over questions: ece(confidence of the modal class, whether it is right).

    samples: a list of classes for each question, as in `semantic_confidence`; golds: for each question the
    class, or a list or set of the classes, that are right. -> {"n", "accuracy", "confidence", "sem_ece", "missing"}.
    A question without a confidence counts as wrong in the accuracy and in "missing", and is not in the other two.
    """
    confidence, correct, right = modal_answers(samples, golds, estimator, splits, seed)
    some = len(confidence) > 0
    return {"n": len(samples), "accuracy": sum(right) / len(samples), "missing": len(samples) - len(confidence),
            "confidence": float(confidence.mean()) if some else math.nan,
            "sem_ece": ece(confidence, correct, bins) if some else math.nan}


# --- 7. The row and the diagrams -----------------------------------------------------------------

def evaluate(probabilities, labels, bins=10):
    """probabilities (n, k), labels (n,) -> the row of metrics that every table prints; confidence is the largest
    probability, and conf_ece its `ece`."""
    probabilities, labels = check_probabilities(probabilities, labels)
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == labels
    return {"n": len(labels), "accuracy": float(correct.mean()), "conf_ece": ece(confidence, correct, bins),
            "cw_ece": classwise_ece(probabilities, labels, bins), "nll": nll(probabilities, labels),
            "brier": brier(probabilities, labels), "ada_ece": adaptive_ece(confidence, correct, bins),
            "smooth_ece": smooth_ece(confidence, correct), "mce": maximum_calibration_error(confidence, correct, bins),
            "auroc": auroc(confidence, correct), "confidence": float(confidence.mean(dtype=float)),
            "ece_floor": ece_floor(confidence, bins=bins)}


def evaluate_open(samples, golds, bins=10):
    """Arguments as for `sem_ece` -> the row of metrics of sampled answers: by both estimators, the plug-in's with its
    interval."""
    confidence, correct, _ = modal_answers(samples, golds)
    low = high = split = math.nan
    if len(confidence):
        low, high = bootstrap_interval(lambda c, y: ece(c, y, bins), confidence, correct)
    if min(map(len, samples)) > 1:
        split = sem_ece(samples, golds, "split", bins)["sem_ece"]
    return {**sem_ece(samples, golds, bins=bins), "sem_ece_split": split, "sem_ece_low": low, "sem_ece_high": high}


def bin_rows(confidence, correct, bins):
    """-> for each equal-width bin: number of rows, mean confidence, accuracy (both NaN where it is empty)."""
    bin_of = equal_width(confidence, bins)
    count = np.bincount(bin_of, minlength=bins)
    with np.errstate(invalid="ignore"):
        return zip(count, np.bincount(bin_of, confidence, bins) / count, np.bincount(bin_of, correct, bins) / count)


def reliability_diagram(confidence, correct, bins=10, title="", width=40):
    """Text: a line for each equal-width bin, with a bar as long as the larger of confidence and accuracy.

    The bar is "=" up to the smaller of the two; the rest is "-" where the model claims more than it
    reaches (overconfident) and "+" where it reaches more than it claims (underconfident).
    """
    confidence, correct = check_confidence(confidence, correct)
    lines = [title] * bool(title) + ["bin               n   conf    acc   - overconfident, + underconfident"]
    for b, (count, claimed, right) in enumerate(bin_rows(confidence, correct, bins)):
        line = f"{'(' if b else '['}{b / bins:.2f}, {(b + 1) / bins:.2f}] {count:6d}"
        if count:
            short, long = sorted(round(width * x) for x in (claimed, right))
            line += f"  {claimed:.3f}  {right:.3f}   {'=' * short}{('-' if claimed > right else '+') * (long - short)}"
        lines.append(line)
    return "\n".join([*lines, f"n = {len(correct)}, ECE = {ece(confidence, correct, bins):.4f}"])


def new_figure(figsize):
    """An empty figure; ImportError, naming it, without the package matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need the package matplotlib (pip install matplotlib)") from None
    return Figure(figsize=figsize, dpi=150, layout="constrained")


def save_png(figure, path):
    """The figure to `path`, once all of it has been drawn."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write(path, drawn.getvalue())


def plot_reliability(panels, path, bins=10):
    """PNG of reliability diagrams side by side; panels: list of (title, confidence, correct)."""
    figure = new_figure(figsize=(3.2 * len(panels), 4))
    axes = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False, height_ratios=(4, 1))
    centre, width = (np.arange(bins) + 0.5) / bins, 1 / bins
    for (title, confidence, correct), (top, bottom) in zip(panels, axes.T):
        confidence, correct = check_confidence(confidence, correct)
        count, claimed, right = map(np.array, zip(*bin_rows(confidence, correct, bins)))
        top.bar(centre, right, width, color="#4c72b0", edgecolor="white", label="accuracy")
        top.bar(centre, claimed - right, width, right, color="#dd845280", edgecolor="#dd8452", hatch="//",
                label="gap to confidence")
        top.plot([0, 1], [0, 1], "--", color="grey", linewidth=1)
        top.set(title=title, xlim=(0, 1), ylim=(0, 1))
        top.text(0.04, 0.72, f"ECE {ece(confidence, correct, bins):.3f}\nn = {len(correct)}", fontsize=9)
        bottom.bar(centre, count / len(correct), width, color="#8c8c8c", edgecolor="white")
        bottom.set(xlabel="confidence")
    axes[0, 0].set(ylabel="accuracy")
    axes[0, 0].legend(loc="upper left", fontsize=8, frameon=False)
    axes[1, 0].set(ylabel="share")
    save_png(figure, path)


def plot_steps(traces, path):
    """PNG of a way through training; traces: {method: one dict a step, with any of upper, lower, lam and log_scale}."""
    panels = {"upper": "F, minus the entropy", "lower": "L, the training loss", "lam": "lambda", "log_scale": "mean log_scale"}
    figure = new_figure(figsize=(12, 3))
    for ax, (key, title) in zip(figure.subplots(1, 4), panels.items()):
        for method, trace in traces.items():
            points = [(i, step[key]) for i, step in enumerate(trace) if key in step]
            if points:
                ax.plot(*zip(*points), label=method, linewidth=0.8)
        ax.set(title=title, xlabel="step")
        ax.set_yscale("symlog" if key == "lam" else "linear")
    ax.legend(fontsize=7)
    save_png(figure, path)


def plot_accuracy(rows, path):
    """PNG of accuracy against conf-ECE, a panel a test set: means over the seeds, a line through the settings ("calm",
    "calm/eta=5") of each method. rows: dicts with method, domain, scoring, accuracy and conf_ece."""
    panels = list(dict.fromkeys((row["domain"], row["scoring"]) for row in rows))
    figure = new_figure(figsize=(6 * len(panels), 5))
    for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        here = {}                                          # method -> setting -> (conf_ece, accuracy) of every seed
        for row in rows:
            if (row["domain"], row["scoring"]) == panel:
                settings = here.setdefault(row["method"].split("/")[0], {})
                settings.setdefault(row["method"], []).append((row["conf_ece"], row["accuracy"]))
        for i, (method, settings) in enumerate(here.items()):
            points = sorted(tuple(np.mean(values, 0)) for values in settings.values())
            ax.plot(*zip(*points), "-", color=f"C{i % 10}", marker="os^vDPX*<>phd"[i % 13], label=method, linewidth=0.8)
        ax.set(title=", ".join(panel) + " scoring", xlabel="conf-ECE", ylabel="accuracy")
        ax.legend(fontsize=7)
    save_png(figure, path)


def check_prediction(row):
    """One line of predictions -> whether it is of an open question, and (probabilities, gold) or (classes, gold); or a
    ValueError."""
    if isinstance(row, dict) and {"classes", "gold"} <= row.keys():
        classes, gold = row["classes"], row["gold"]
        everything = [*classes, gold] if isinstance(classes, list) and classes else [{}]
        parts = [part for c in everything for part in (c if isinstance(c, list) else [c])]     # a class may be a list of tokens
        if any(isinstance(part, (list, dict)) for part in parts):
            raise ValueError("classes must be a list of at least one text or number, and gold one of the same kind")
        *classes, gold = [tuple(c) if isinstance(c, list) else c for c in everything]
        return True, (classes, gold)
    if not isinstance(row, dict) or not {"probabilities", "choice", "gold"} <= row.keys():
        raise ValueError("a prediction is a JSON object with probabilities, choice and gold, or with classes and gold")
    p, choice, gold = row["probabilities"], row["choice"], row["gold"]
    check_probabilities([p], [0])
    for name, index in (("choice", choice), ("gold", gold)):
        if type(index) is not int or not 0 <= index < len(p):
            raise ValueError(f"{name} must be a whole number in 0..{len(p) - 1}, not {index!r}")
    if p[choice] < max(p):
        raise ValueError(f"choice {choice} is not the most probable option")
    return False, (p, gold)


def read_predictions(path):
    """JSON lines, plain or gzipped, a question each: {"method", "seed", "domain" or "file", "probabilities", "choice",
    "gold"}, or, where it was open, {..., "classes" (of the samples, null where one was empty), "gold" (the right class, or
    a list of them)}; method, seed and domain may be missing.

    -> {(method, seed, domain, False): (probabilities (n, k), padded with 0, and gold (n,)),
    (method, seed, domain, True): (classes, golds)}; a ValueError names file and line."""
    with open(path, "rb") as f:
        zipped = f.read(2) == b"\x1f\x8b"
    groups, number = {}, 0
    with (gzip.open if zipped else open)(path, "rb") as f:
        try:
            for number, line in enumerate(f, 1):
                if line.strip():
                    row = json.loads(line.decode("utf-8-sig"))
                    is_open, prediction = check_prediction(row)
                    key = [str(row.get(name, "")) for name in ("method", "seed", "domain" if "domain" in row else "file")]
                    groups.setdefault((*key, is_open), []).append(prediction)
        except (ValueError, TypeError, EOFError, RecursionError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not groups:
        raise ValueError(f"{path} holds no predictions")
    k = max((len(p) for key, rows in groups.items() if not key[-1] for p, _ in rows), default=0)
    padded = lambda rows: np.array([p + [0] * (k - len(p)) for p, _ in rows], float)
    return {key: tuple(zip(*rows)) if key[-1] else (padded(rows), np.array([gold for _, gold in rows]))
            for key, rows in groups.items()}


# --- 8. The command lines ------------------------------------------------------------------------
# What those of train.py and bilevel.py share, and this file's own.

class Parser(argparse.ArgumentParser):
    """argparse whose errors are exceptions: main() says them in one sentence and exits with 2."""

    def error(self, message):
        raise ValueError(message)


def check_output(path):
    """OSError now if `path` could not be written later, after the work."""
    path = Path(path)
    folder = path.absolute().parent
    if not path.name or path.is_dir():
        raise IsADirectoryError(f"{path}: is a directory")
    if not folder.is_dir():
        raise FileNotFoundError(f"{path}: its folder does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(f"{path}: cannot be written")


def write(path, content):
    """Bytes to `path` in one move, so that a reader never meets half a file; through links, and straight into a
    device or a pipe."""
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()
    partial = Path(f"{path}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except BaseException:                                  # a full disk is not left fuller
        partial.unlink(missing_ok=True)
        raise


def write_json(path, document):
    """A dict with "rows", dicts of numbers and texts, to `path` as JSON, which knows no NaN and no infinity: null."""
    finite = lambda v: None if isinstance(v, float) and not math.isfinite(v) else v
    rows = [{key: finite(value) for key, value in row.items()} for row in document["rows"]]
    write(path, (json.dumps({**document, "rows": rows}, indent=1) + "\n").encode("utf-8"))


def complain(program, error):
    """What went wrong, in one sentence on stderr; returns the exit code 2."""
    if isinstance(error, OSError) and error.strerror:      # instead of "[Errno 2] ..."
        if not error.filename:                             # a full disk or a closed pipe: Python would try again to print
            sys.stdout = open(os.devnull, "w")
        error = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    print(f"{program}: {error}", file=sys.stderr)
    return 2


def main(argv=None):
    """The command line; returns the exit code: 0, 2 for bad input, 130 for Ctrl-C."""
    parser = Parser(description="All metrics and reliability diagrams of a file of predictions.", allow_abbrev=False)
    parser.add_argument("predictions", help="JSON lines, plain or .gz, of method, domain, probabilities, choice, gold; "
                        "or of classes, gold")
    parser.add_argument("--bins", type=int, default=10, help="equal-width bins (default 10)")
    parser.add_argument("--json", metavar="PATH", help="write every number here too")
    parser.add_argument("--plot", metavar="PNG", help="write the reliability diagrams here")
    try:
        args = parser.parse_args(argv)
        for path in (args.json, args.plot):
            if path is not None:
                check_output(path)
        if not 1 <= args.bins <= 10_000:
            raise ValueError(f"--bins {args.bins} is not between 1 and 10000")
        report(args)
        return 0
    except (ValueError, OSError, ImportError) as error:
        return complain("metrics.py", error)
    except KeyboardInterrupt:
        print("\nmetrics.py: interrupted", file=sys.stderr)
        return 130


def report(args):
    """Print the metrics and diagrams of args.predictions; write --json and --plot."""
    rows, panels, diagrams, groups = [], [], [], read_predictions(args.predictions)
    several = len({seed for _, seed, _, _ in groups}) > 1
    for (method, seed, domain, is_open), (predictions, gold) in groups.items():
        if is_open:
            confidence, correct, _ = modal_answers(predictions, gold)
            numbers = evaluate_open(predictions, gold, args.bins)
        else:
            confidence, correct = predictions.max(1), predictions.argmax(1) == gold
            low, high = bootstrap_interval(lambda c, y: ece(c, y, args.bins), confidence, correct)
            numbers = {**evaluate(predictions, gold, args.bins), "conf_ece_low": low, "conf_ece_high": high}
        rows.append({"method": method, **({"seed": seed} if several else {}), "domain": domain, **numbers})
        if len(confidence):                                # some answer was not empty
            panels.append((f"{method}, {domain}" + f", seed {seed}" * several, confidence, correct))
            diagrams.append(reliability_diagram(confidence, correct, args.bins, panels[-1][0]))
    if args.json:
        write_json(args.json, {"rows": rows})
    if args.plot and panels:
        plot_reliability(panels, args.plot, args.bins)
    for columns in dict.fromkeys(map(tuple, rows)):        # options and open questions have columns of their own
        cells = [columns]
        for row in rows:
            if tuple(row) == columns:
                cells.append([f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()])
        widths = [max(map(len, column)) for column in zip(*cells)]
        print("\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells))
    print("\n" + "\n\n".join(diagrams), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, at_ctrl_c)
    sys.exit(main())
