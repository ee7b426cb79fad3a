"""The family of credit methods in float64, by plain Python loops over tokens: formulas of the papers, nothing imported
from the package.

A batch is a `Rows`; a token is the pair (row, column) of a true mask element. Each function gives {token: advantage}.
"""

import math
from dataclasses import dataclass

FLOAT64_EPS = 2.0**-52


@dataclass
class Rows:
    """Lists by row: `mask`, `entropy`, `log_prob` by row and column; `penalty` is 0 where there is none."""

    mask: list
    group: list
    correct: list
    entropy: list
    log_prob: list
    reward: list
    penalty: list

    @property
    def tokens(self):
        return [(i, t) for i, row in enumerate(self.mask) for t, alive in enumerate(row) if alive]

    @property
    def whole(self):
        """Rows with a token."""
        return [i for i, row in enumerate(self.mask) if any(row)]

    def members(self, i):
        return [k for k in self.whole if self.group[k] == self.group[i]]

    def of_scope(self, i, scope):
        """The tokens of the scope that row i belongs to."""
        inside = {
            "batch": lambda k: True,
            "group": lambda k: self.group[k] == self.group[i],
            "response": lambda k: k == i,
        }
        return [(k, t) for k, t in self.tokens if inside[scope](k)]

    def h(self, token):
        return max(self.entropy[token[0]][token[1]], 0.0)

    def logp(self, token):
        return min(self.log_prob[token[0]][token[1]], 0.0)

    def shaped(self, i):
        return self.reward[i] + self.penalty[i]


def std_of(values):
    if len(values) < 2 or max(values) - min(values) <= 16 * FLOAT64_EPS * max(abs(x) for x in values):
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))


def normal(rows, i, centre):
    std = std_of([rows.shaped(k) for k in rows.members(i)])
    return (rows.shaped(i) - centre) / (std + 1e-6) if std else 0.0


def dapo(rows):
    found = {}
    for i, t in rows.tokens:
        members = rows.members(i)
        found[i, t] = normal(rows, i, sum(rows.shaped(k) for k in members) / len(members))
    return found


def dr_grpo(rows):
    found = {}
    for i, t in rows.tokens:
        members = rows.members(i)
        found[i, t] = rows.shaped(i) - sum(rows.shaped(k) for k in members) / len(members)
    return found


def linear_quantile(values, q):
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def count(share, n):
    return math.ceil(round(share * n, 9))


def fork20(rows, ratio=0.2, scope="batch", rule="threshold", select="top", polarity="both", normalizer="kept"):
    kept = set()
    for token in rows.tokens:
        i = token[0]
        side = {"both": True, "correct": rows.correct[i], "wrong": not rows.correct[i]}
        if not side[polarity]:
            kept.add(token)
            continue
        judged = [
            other
            for other in rows.of_scope(i, scope)
            if polarity == "both" or rows.correct[other[0]] == (polarity == "correct")
        ]
        if rule == "threshold":
            top = rows.h(token) >= linear_quantile([rows.h(other) for other in judged], 1 - ratio)
        else:
            ranked = sorted(judged, key=lambda other: (-rows.h(other), other))
            top = token in ranked[: count(ratio, len(judged))]
        if top == (select == "top"):
            kept.add(token)
    scale = len(rows.tokens) / max(len(kept), 1) if normalizer == "kept" else 1.0
    return {token: value * scale if token in kept else 0.0 for token, value in dapo(rows).items()}


def entropy_bonus(rows, alpha=0.4, kappa=2.0):
    return {token: a + min(alpha * rows.h(token), abs(a) / kappa) for token, a in dapo(rows).items()}


def eapo(rows, alpha=0.2, phi=2.0, scope="batch"):
    found = {}
    for token, a in dapo(rows).items():
        values = [rows.h(other) for other in rows.of_scope(token[0], scope)]
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
        if max(values) - min(values) <= 16 * FLOAT64_EPS * max(values):
            deviation = 0.0
        z = (rows.h(token) - mean) / deviation if deviation else 0.0
        z = max(-abs(a) / phi, min(abs(a) / phi, z))
        found[token] = a + alpha * (0.0 if a == 0 else math.copysign(1.0, a)) * z
    return found


def polarity_entropy(rows, lambda_correct=0.5, lambda_wrong=-0.5, scope="batch"):
    found = {}
    for token, a in dapo(rows).items():
        values = [rows.h(other) for other in rows.of_scope(token[0], scope)]
        mean = sum(values) / len(values)
        factor = lambda_correct if rows.correct[token[0]] else lambda_wrong
        found[token] = a * max(0.0, 1 + factor * (rows.h(token) / mean - 1 if mean else 0.0))
    return found


def mean_entropy(rows, i):
    values = [rows.h((k, t)) for k, t in rows.tokens if k == i]
    return sum(values) / len(values)


def eda(rows, scope="group", clamp=None):
    found = {}
    for token, a in dapo(rows).items():
        others = rows.members(token[0]) if scope == "group" else rows.whole
        mean = sum(max(mean_entropy(rows, k), 1e-6) for k in others) / len(others)
        share = max(mean_entropy(rows, token[0]), 1e-6) / mean
        if clamp:
            share = min(max(share, clamp[0]), clamp[1])
        found[token] = a / share
    return found


def empg(rows, k=1.0):
    base = dapo(rows)
    if not rows.whole:
        return base
    h = {i: mean_entropy(rows, i) for i in rows.whole}
    low, high = min(h.values()), max(h.values())
    g = {i: math.exp(-k * ((h[i] - low) / (high - low) if high > low else 0.0)) for i in rows.whole}
    mean_g = sum(g.values()) / len(g)
    each = {}
    for (i, _), a in base.items():
        each[i] = a * g[i] / mean_g
    centre = sum(each.values()) / len(each)
    return {(i, t): each[i] - centre for i, t in base}


def ar(rows, alpha=0.2):
    return {token: a * (alpha * math.exp(rows.logp(token)) + 1 - alpha) for token, a in dapo(rows).items()}


def prob_mask(rows, threshold=0.9):
    return {token: a if math.exp(rows.logp(token)) < threshold else 0.0 for token, a in dapo(rows).items()}


def stare_o1(rows, top_ratio=0.1, w=1.1, m=1.0, target_entropy=0.3):
    found = dapo(rows)
    if not found:
        return found
    if target_entropy is not None and sum(rows.h(token) for token in found) / len(found) >= target_entropy:
        return found
    for sign, factor in ((1, w), (-1, m)):
        side = [token for token, a in found.items() if a * sign > 0]
        ranked = sorted(side, key=lambda token: (rows.logp(token), token))
        for token in ranked[: count(top_ratio, len(side))]:
            found[token] *= factor
    return found


def w_reinforce(rows, correct=0.1, wrong=1.0):
    return {(i, t): correct if rows.correct[i] else -wrong for i, t in rows.tokens}


def qae(rows, K=0.4):
    found = {}
    for i, t in rows.tokens:
        members = rows.members(i)
        values = sorted(rows.reward[k] for k in members)
        baseline = next(x for x in values if sum(y <= x for y in values) / len(values) >= K - 1e-9)
        found[i, t] = normal(rows, i, baseline)
    return found


def dapo_blame(rows, kappa=0.5):
    return {(i, t): kappa * a if a < 0 and not rows.correct[i] else a for (i, t), a in dapo(rows).items()}


def rl_zvp(rows, alpha=0.1, max_scope="response"):
    found = {}
    for token, a in dapo(rows).items():
        verdicts = {bool(rows.correct[k]) for k in rows.members(token[0])}
        if verdicts == {True}:
            a = alpha * rows.h(token)
        elif verdicts == {False}:
            a = -alpha * (max(rows.h(other) for other in rows.of_scope(token[0], max_scope)) - rows.h(token))
        found[token] = a
    return found


# ------------------------------------------------------------------------------------------------- losses of a token


def clipped(a, w, low, high, dual=None):
    """-loss and the coefficient of ∇log π of PPO's clipped token."""
    if a > 0 and w > 1 + high:
        return a * (1 + high), 0.0
    if a < 0 and w < 1 - low:
        return a * (1 - low), 0.0
    if a < 0 and dual is not None and w > dual:
        return a * dual, 0.0
    return a * w, a * w


def ce_gppo(a, w, pi, low, high, dual, beta1, beta2):
    if a < 0 and w < 1 - low:
        return (beta1 * (1 - low) * a,) * 2
    if a > 0 and w > 1 + high:
        return (beta2 * (1 + high) * a,) * 2
    return clipped(a, w, low, high, dual)


def aspo(a, w, pi, low, high, dual):
    if a > 0:
        return (a * min(1 / w, dual) if w <= 1 + high else 0.0,) * 2
    return (a * min(w, dual) if w >= 1 - low else 0.0,) * 2


def dcpo_clip(a, w, pi, low, high, dual):
    floor = 0.5 * (1 + math.sqrt(max(0.0, 1 - 4 * low / pi)))
    ceiling = min(0.5 * (1 + math.sqrt(1 + 4 * high / pi)), max(dual, 10.0))
    return clipped(a, w, 1 - floor, ceiling - 1, dual)
