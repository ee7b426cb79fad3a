"""Signal and noise of gradients, on a policy with a known mean and covariance of every group's gradient."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from softmax_table import CORRECT, PATHS, Exact, G, TableModel, products_of

from gtpo_verl.audit import backward
from gtpo_verl.audit.analysis import Figure
from gtpo_verl.audit.backward import Policy, measure, parts_of
from gtpo_verl.audit.gradients import FEWEST_STEPS, METRICS, Products, figures, figures_of, jackknife, moments
from gtpo_verl.audit.methods import methods
from gtpo_verl.audit.plan import Plan, bytes_of_a_pass
from gtpo_verl.audit.render import gradients_table, print_table
from gtpo_verl.audit.store import Rollout
from gtpo_verl.errors import UserError
from gtpo_verl.planning.shapes import ModelShape

STEP = 24
NAMES = ("dapo", "gtpo", "dapo_blame", "fork20")


@pytest.fixture(scope="module")
def exact() -> Exact:
    return Exact.of(TableModel().table)


def rollouts_of(exact: Exact, groups: np.ndarray) -> list[list[Rollout]]:
    def rollout(k: int, i: int) -> Rollout:
        path = groups[k, i]
        right = bool(CORRECT[path])
        lists = [each[path].tolist() for each in (PATHS, exact.entropy, exact.log_probs)]
        return Rollout(k, k, i, f"c{k}", "", lists[0], [], lists[1], lists[2], right, 2.0 * right - 1, False)

    return [[rollout(k, i) for i in range(groups.shape[1])] for k in range(len(groups))]


def drawn(exact: Exact, count: int, seed: int) -> np.ndarray:
    groups, probability = exact.groups()
    return groups[np.random.default_rng(seed).choice(len(groups), size=count, p=probability)]


def nothing(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


# -------------------------------------------------------------------- the two passes


@pytest.fixture(scope="module")
def measured(exact: Exact) -> tuple[Products, list[backward.Part], dict[str, int], np.ndarray]:
    groups = drawn(exact, 50, seed=1)
    parts, number = parts_of(rollouts_of(exact, groups), 30, 12, methods(NAMES[1:]), None, seed=0)
    products, difference = measure(Policy(TableModel(), lambda row: [0], 1.0), parts, number, nothing)
    assert difference < 1e-12
    return products, parts, number, groups


@pytest.mark.slow
def test_products_against_scores_worked_out_by_hand(exact: Exact, measured: Any) -> None:
    products, parts, number, groups = measured
    assert [len(part.groups) for part in parts] == [12, 12, 6, 12, 8]  # a step, and what is left; then those of G alone
    credit = {name: np.zeros((50, G, 3)) for name in products.names}
    for start, part in zip((0, 12, 24), parts, strict=False):
        for name, column in number.items():
            credit[name][start : start + len(part.groups)] = part.credits[column].numpy().reshape(-1, G, 3)
    scores = exact.scores[groups]
    g = {name: np.einsum("kgt,kgtp->kp", each, scores) for name, each in credit.items()}
    h = exact.gradients(groups, "truth")
    steps = [g["dapo"][rows].mean(0) for rows in (slice(0, 12), slice(12, 24))]  # the whole ones
    rms = np.sqrt(np.mean(np.square(steps), axis=0))
    weight = np.divide(1, rms, where=rms > 0, out=np.zeros_like(rms))  # some rows of the table are never reached
    largest = np.sort(weight[rms > 0])[int(0.99 * (rms > 0).sum()) - 1]
    weight = np.minimum(weight, largest)
    expected = products_of(g, h, np.arange(50) < 30, weight)
    assert (products.audited == expected.audited).all()
    for name in ("gg", "gG", "gh", "gH", "hG", "hh", "hH"):
        np.testing.assert_allclose(getattr(products, name), getattr(expected, name), rtol=0, atol=1e-10, err_msg=name)
    # the parts by token add up to the whole
    along = (products.gH[0] - products.gh[0])[:, :30] / 49
    np.testing.assert_allclose(products.signal.sum((2, 3))[:, :30], along, atol=1e-10)
    pi = np.exp(exact.log_probs[groups[:30]])
    norms = 1 - 2 * pi + pi**2 + (1 - pi) ** 2
    noise = [(credit[name][:30] ** 2 * norms).sum((1, 2)) for name in products.names]
    np.testing.assert_allclose(products.noise.sum((2, 3))[:, :30], noise, atol=1e-10)
    assert products.tokens.sum() == 30 * G * 3


def test_methods_with_equal_credits_share_a_pass(exact: Exact) -> None:
    groups = rollouts_of(exact, drawn(exact, 24, seed=2))
    parts, number = parts_of(groups, 24, 24, methods(["rl_zvp", "gtpo", "kl_cov"]), None, seed=0)
    assert number == {"dapo": 1, "rl_zvp": 1, "gtpo": 2}  # kl_cov acts at other ratios only
    assert len(parts[0].credits) == 3


def test_a_small_forward_pass_gives_the_same_gradients(exact: Exact, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = rollouts_of(exact, drawn(exact, 6, seed=3))
    rollouts, credit = [each for group in groups for each in group], torch.randn(2, 24, 3, dtype=torch.float64)
    policy = Policy(TableModel(), lambda row: [0], 1.0)
    whole, slopes = policy.gradients(rollouts, credit), policy.along(rollouts, torch.ones(policy.size).double())
    monkeypatch.setattr(backward, "MOST_LOGITS", 2 * 4 * 5)
    torch.testing.assert_close(policy.gradients(rollouts, credit), whole, rtol=0, atol=1e-12)
    for each, other in zip(policy.along(rollouts, torch.ones(policy.size).double()), slopes, strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rows", "prompt", "response"), [(1, 40, 600), (8, 100, 60)])
def test_a_pass_saves_what_the_check_of_the_memory_says(rows: int, prompt: int, response: int) -> None:
    """The tensors that autograd keeps of a small Qwen2, whose gradient is differentiated once more."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = Qwen2ForCausalLM(config).eval()
    known = {each.untyped_storage().data_ptr() for each in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no other gets its place
        return tensor

    rollouts = [Rollout(0, 0, i, "", "", [1] * response, [], [0.0], [0.0], True, 1.0, False) for i in range(rows)]
    policy = Policy(model, lambda row: [1] * prompt, 1.0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.along(rollouts, torch.ones(policy.size))
    shape = ModelShape("", "", 0, 0, 0, 0, 2, 64, 256, 4, 2, 16, 1000, 4096)
    beside = 4 * 2 * policy.size  # the gradient and the direction, which are counted a parameter
    found = sum(each.untyped_storage().nbytes() for each in saved.values()) - beside
    assert found == pytest.approx(bytes_of_a_pass(shape, rows, prompt, response), rel=0.1)


def test_a_configuration_may_nest_that_of_the_text() -> None:
    from transformers import AutoModelForCausalLM, Gemma3Config

    torch.manual_seed(0)
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    policy = Policy(
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().double(), lambda row: [3, 4], 1.0
    )
    rollouts = [Rollout(0, 0, i, "", "", [5, 6, 7], [], [0.0] * 3, [0.0] * 3, True, 1.0, False) for i in range(2)]
    credit, direction = torch.randn(1, 2, 3, dtype=torch.float64), torch.randn(policy.size, dtype=torch.float64)
    slopes, *_ = policy.along(rollouts, direction)
    found = policy.gradients(rollouts, credit)[0] @ direction
    torch.testing.assert_close(found, (credit[0] * slopes).sum(), rtol=1e-4, atol=1e-4)  # its norms are in float32


def test_the_temperature_is_part_of_the_policy(exact: Exact) -> None:
    (group,) = rollouts_of(exact, drawn(exact, 1, seed=3))
    cold, _ = Policy(TableModel(), lambda row: [0], 0.5).log_probs(group)
    table = Exact.of(2 * TableModel().table)
    np.testing.assert_allclose(cold.detach(), table.log_probs[[PATHS.tolist().index(each.tokens) for each in group]])


def test_some_parameters(exact: Exact) -> None:
    (group,) = rollouts_of(exact, drawn(exact, 1, seed=4))
    model = TableModel()
    credit = torch.randn(1, G, 3, dtype=torch.float64)
    whole = Policy(model, lambda row: [0], 1.0).gradients(group, credit)
    part = Policy(model, lambda row: [0], 1.0, "^fir").gradients(group, credit)
    assert torch.equal(part, whole[:, : part.shape[1]])
    with pytest.raises(UserError, match="--gradient-params layers: no parameter has such a name; the first are first"):
        Policy(model, lambda row: [0], 1.0, "layers")


# -------------------------------------------------------------------- the figures

ROWS = ("dapo", "gtpo", "dapo_blame", "first")
CHECKED = ("signal", "noise", "snr", "along_truth", "cosine", "gain", "own/dapo", "along/dapo")


@pytest.fixture(scope="module")
def population(exact: Exact) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of all groups by method, the leave-one-out gradients, probabilities, and a weight of coordinates."""
    groups, probability = exact.groups()
    g = {name: exact.gradients(groups, name) for name in ROWS[:-1]}
    g["first"] = exact.gradients(groups, "dapo", tokens=2)  # which is not in the direction of the truth
    h = exact.gradients(groups, "truth")
    return g, h, probability, np.random.default_rng(5).uniform(0.5, 2, h.shape[1])


def truths(population: Any, metric: int) -> dict[tuple[str, str], float]:
    g, h, p, weight = population
    w = weight if metric else np.ones_like(weight)
    mean_h = p @ h
    found: dict[tuple[str, str], float] = {}
    for name, each in g.items():
        mean = p @ each
        signal, second, along, truth = mean @ (w * mean), p @ (each**2 @ w), mean @ (w * mean_h), mean_h @ (w * mean_h)
        noise = second - signal
        values = (signal, noise, STEP * signal / noise, along, along / np.sqrt(signal * truth), along / truth)
        found |= {(name, key): value for key, value in zip(CHECKED, values, strict=False)}
        found[name, "own/dapo"], found[name, "along/dapo"] = noise / signal, second / along**2
    for key in ("own/dapo", "along/dapo"):
        found |= {(name, key): found[name, key] / found["dapo", key] for name in reversed(ROWS)}
    return found


def audit(population: Any, count: int, others: int, rng: np.random.Generator, **more: np.ndarray) -> Products:
    g, h, p, weight = population
    rows = rng.choice(len(p), size=count + others, p=p)
    audited = np.arange(count + others) < count
    return products_of(
        {name: each[rows] * audited[:, None] for name, each in (g | more).items()}, h[rows], audited, weight
    )


def coverage(population: Any, audits: int, count: int = 192, others: int = 96) -> dict[tuple[str, str, str], float]:
    """Share of intervals that contain the exact value, by method, metric and figure."""
    rng, inside = np.random.default_rng(7), {}
    exact = [truths(population, metric) for metric in range(2)]
    for _ in range(audits):
        products = audit(population, count, others, rng)
        for metric, name in enumerate(METRICS):
            found = moments(products, metric)
            truth = jackknife(found.truth, products.audited).resolved
            for row, method in enumerate(ROWS):
                for key, (value, low, high) in figures_of(row, found, products, STEP, truth).items():
                    if method == "dapo" and "/" in key:
                        continue
                    if key == "cosine" and method != "first":
                        continue  # 1: a bound, where an interval is too narrow (90 %)
                    if key in CHECKED and value is not None:
                        within = low <= exact[metric][method, key] <= high
                        inside.setdefault((method, name, key), []).append(within)
    assert all(len(each) > 0.9 * audits for each in inside.values())
    return {key: float(np.mean(each)) for key, each in inside.items()}


def test_estimates_are_unbiased(population: Any) -> None:
    rng = np.random.default_rng(9)
    found = [moments(audit(population, 40, 20, rng), 1) for _ in range(400)]
    exact = truths(population, 1)
    for row, name in enumerate(ROWS):
        for key, draws in (
            ("signal", [each.signal[row, 0] for each in found]),
            ("along_truth", [each.along[row, 0] for each in found]),
        ):
            assert abs(np.mean(draws) - exact[name, key]) < 4 * np.std(draws) / 20, (name, key)


def test_intervals_cover(population: Any) -> None:
    shares = coverage(population, 300)
    error = np.sqrt(0.95 * 0.05 / 300)
    assert len(shares) == 2 * (4 * 5 + 1 + 3 * 2)
    assert all(0.93 - 3 * error < share <= 0.97 + 3 * error for share in shares.values()), shares
    assert 0.93 < np.mean(list(shares.values())) < 0.97


@pytest.mark.exhaustive
def test_intervals_cover_within_a_hundredth(population: Any) -> None:
    shares = coverage(population, 4000)
    assert {key: share for key, share in shares.items() if not 0.93 < share < 0.97} == {}


def figure_of(found: dict[str, Any], method: str, metric: str, key: str) -> Figure:
    return found["methods"][method][metric][key]


def test_the_negative_of_dapo_disagrees_and_noise_costs_groups(population: Any) -> None:
    g, h, _, _ = population
    rng = np.random.default_rng(13)
    noisy = g["dapo"] + rng.normal(size=h.shape) * g["dapo"].std()
    blank = rng.normal(size=h.shape)
    products = audit(population, 400, 100, rng, against=-g["dapo"], noisy=noisy, blank=blank - blank.mean(0))
    found = figures(products, STEP)
    for metric in METRICS:
        against = {
            key: figure_of(found, "against", metric, key) for key in ("cosine", "gain", "along/dapo", "own/dapo")
        }
        assert against["along/dapo"].value == pytest.approx(-1)
        assert against["own/dapo"].value == pytest.approx(1)  # why the other figure is signed
        assert against["cosine"].high < -0.9
        assert against["gain"].value < 0
        assert figure_of(found, "noisy", metric, "along/dapo").low > 1
        assert figure_of(found, "noisy", metric, "snr").value < figure_of(found, "dapo", metric, "snr").value
        # without signal there is nothing to divide by
        for key in ("snr", "own/dapo", "along/dapo", "cosine"):
            assert figure_of(found, "blank", metric, key).value is None, key
        assert figure_of(found, "blank", metric, "signal").contains(0.0)
        assert figure_of(found, "dapo", metric, "along/dapo").value == pytest.approx(1)
    shares = found["tokens"]["shares"]
    assert [shares[name]["signal"][0][0].value is None for name in ("dapo", "against", "blank")] == [False, False, True]
    assert shares["blank"]["noise"][0][0].value is not None
    few = figures(audit(population, 19, 0, rng), STEP)["tokens"]["shares"]["dapo"]
    assert all(cell.value is None for kind in few.values() for line in kind for cell in line)


def test_adams_metric_needs_the_groups_of_eight_steps(population: Any) -> None:
    """Its weights are of the same groups; with few steps they are large where the noise of these groups cancels."""

    def without_signal(steps: int, rng: np.random.Generator) -> float:
        """The SNR of a step of 16 groups, whose truth is 0."""
        g = rng.normal(size=(16 * steps, 2000))
        weight = backward._adam(torch.tensor(np.sqrt(np.square(g.reshape(steps, 16, -1).mean(1)).mean(0)))).numpy()
        second, of_sum = (np.square(g) @ weight).mean(), np.square(g.sum(0)) @ weight
        signal = (of_sum - len(g) * second) / (len(g) * (len(g) - 1))
        return float(16 * signal / (second - signal))

    rng = np.random.default_rng(17)
    bias = {steps: np.mean([without_signal(steps, rng) for _ in range(20)]) for steps in (3, FEWEST_STEPS, 16)}
    assert bias[3] == pytest.approx(-0.10, abs=0.01)  # the figures of docs/guides/audit.md
    assert bias[FEWEST_STEPS] == pytest.approx(-0.02, abs=0.01)
    assert abs(bias[16]) < 0.01

    products = audit(population, 48, 0, rng)
    few, enough = figures(products, 48 // FEWEST_STEPS + 1), figures(products, 48 // FEWEST_STEPS)
    assert few["truth"]["adam"].value is None
    assert all(each["adam"][key].value is None for each in few["methods"].values() for key in each["adam"])
    assert figure_of(enough, "dapo", "adam", "noise").value is not None
    assert figure_of(few, "dapo", "sgd", "noise") == figure_of(enough, "dapo", "sgd", "noise")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("steps", "snr", "rank", "of_snr", "of_needed"),
    [(8, 2.9, 20, 0.91, 0.97), (8, 0.5, 20, 0.80, 0.90), (16, 2.9, 100, 0.95, 0.99), (16, 0.5, 20, 0.92, 0.97)],
)
def test_adams_metric_is_biased_with_signal_too(
    steps: int, snr: float, rank: int, of_snr: float, of_needed: float
) -> None:
    """The figures of docs/guides/audit.md: measured over true SNR of a step, and groups needed by a method that has
    half of the baseline's noise, which lies in 2 `rank` of 1,000 directions.
    """
    rng, size = np.random.default_rng(0), 1000
    scale = np.exp(rng.normal(size=size))
    mean = rng.normal(size=size) * scale
    first, second = rng.normal(size=(2, rank, size)) * scale * np.sqrt(STEP / snr / rank / 2)
    spread = np.square(first).sum(0), np.square(second).sum(0)
    known = backward._adam(torch.tensor(np.sqrt(mean**2 + sum(spread) / STEP))).numpy()
    signal, noise, half = mean**2 @ known, sum(spread) @ known, spread[0] @ known
    count = steps * STEP
    found = []
    for _ in range(20):
        shared, rest, other, more = (rng.normal(size=(count, rank)) @ each for each in (first, second) * 2)
        dapo, less = mean + shared + rest, mean + shared
        h = np.concatenate([dapo, mean + other + more])
        rms = np.sqrt(np.square(dapo.reshape(steps, STEP, size).mean(1)).mean(0))
        padded = {"dapo": np.pad(dapo, ((0, count), (0, 0))), "less": np.pad(less, ((0, count), (0, 0)))}
        audited = np.arange(2 * count) < count
        products = products_of(padded, h, audited, backward._adam(torch.tensor(rms)).numpy())
        of_dapo, of_less = (figures_of(row, moments(products, 1), products, STEP, True) for row in range(2))
        found.append((of_dapo["snr"].value * noise / signal / STEP, of_less["along/dapo"].value))
    needed = (signal + half) / (signal + noise)
    assert np.median([each[0] for each in found]) == pytest.approx(of_snr, abs=0.05)
    assert np.median([each[1] for each in found]) / needed == pytest.approx(of_needed, abs=0.05)


def test_files_and_tables(exact: Exact, measured: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    products, *_ = measured
    products.write(tmp_path / "gradients.npz")
    again = Products.read(tmp_path / "gradients.npz")
    for name in Products.__dataclass_fields__:
        assert np.array_equal(getattr(again, name), getattr(products, name)), name
    found = json.loads(json.dumps(figures(again, STEP)))
    shares = found["tokens"]["shares"]["gtpo"]["signal"]
    assert sum(cell[0] for line in shares for cell in line if cell[0]) == pytest.approx(1, abs=1e-6)
    facts = {"groups": 30, "others": 20, "wanted": 40, "samples": G, "parameters": 18, "chosen": "fir", "step": 12}
    facts |= {"log_prob_difference": 1e-7, "unscored": ["kl_cov"]}
    print_table(gradients_table(found, facts, Plan(prompts=60, gradients=40)))
    printed = " ".join(capsys.readouterr().out.split())
    assert "30 groups of 4 responses with contrast and 20 more in the true gradient" in printed
    assert "Asked for were 40 groups" in printed
    assert "credits of 12 groups at a time, which is a step, the last 6 together. Intervals" in printed
    assert all(word in printed for word in ("DAPO, less blame", "n.r.:", "kl_cov", "fir"))
    print_table(gradients_table(found, facts | {"step": 64}, Plan(prompts=60, gradients=40)))
    printed = " ".join(capsys.readouterr().out.split())
    assert "credits of all of them together, fewer than the 64 of a step. Intervals" in printed
    figure = found["methods"]["gtpo"]["sgd"]["along/dapo"]
    for interval, said in (
        ([0.7, 1.1], "times the groups of DAPO [0.70 to 1.10], which chance alone can give."),
        ([0.7, 0.9], "times the groups of DAPO [0.70 to 0.90]."),
    ):
        figure[:] = [0.8, *interval]
        assert said in " ".join(gradients_table(found, facts, Plan(prompts=60, gradients=40)).sentences)
    figure[:] = [-0.8, -0.9, -0.7]
    table = gradients_table(found, facts | {"step": 10}, Plan(prompts=60, gradients=40))
    assert table.sentences[0].endswith("goes against the true gradient.")
    assert "which is a step. Intervals" in table.sentences[1]
    found["methods"] = {"dapo": found["methods"]["dapo"]}
    assert gradients_table(found, facts, Plan(prompts=60, gradients=40)).sentences[0].startswith("30 groups")
