"""Gradients of a Hugging Face causal model: the sums over all groups first, then each group's products with them.

Gradients are linear in the credit, so a group takes one forward pass and one backward pass a distinct credit, in either
of the two passes over the data, and one more of each for the table by token. Nothing of the size (groups x parameters)
is kept.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gtpo_verl.audit.analysis import BASELINE
from gtpo_verl.audit.gradients import DECILES, Products
from gtpo_verl.audit.methods import Method, credit_of
from gtpo_verl.audit.plan import MOST_LOGITS
from gtpo_verl.audit.sampling import Advance
from gtpo_verl.audit.score import batch_of, padded
from gtpo_verl.audit.store import Rollout
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.context import Overlong

PRODUCTS = ("gg", "gG", "gh", "gH", "hG")  # of g and h of a group with each other and with their sums over all
LARGEST_WEIGHT = 0.99  # quantile of the weights of Adam's metric, above which they are cut


@dataclass(frozen=True, eq=False)
class Part:
    """Groups whose credits are computed together, as those of a training step: their rollouts and the rows of each.

    credits: (C, B, T), the leave-one-out credit first; a part that is in G alone has no other.
    """

    rollouts: list[Rollout]
    groups: list[slice]
    credits: torch.Tensor


class Policy:
    """log π of responses, and its gradients with respect to the parameters with `chosen` in their names.

    model: a causal model of transformers. prompt: the token ids of the prompt of a row of the data. temperature: of
    sampling, which is part of the policy. Raises UserError where no parameter has such a name.
    """

    def __init__(
        self, model: Any, prompt: Callable[[int], Sequence[int]], temperature: float, chosen: str = ""
    ) -> None:
        self.parameters = [each for name, each in model.named_parameters() if re.search(chosen, name)]
        if not self.parameters:
            names = ", ".join([name for name, _ in model.named_parameters()][:3])
            raise UserError(f"--gradient-params {chosen}: no parameter has such a name; the first are {names}.")
        model.requires_grad_(False)
        for each in self.parameters:
            each.requires_grad_(True)
        self.size = sum(each.numel() for each in self.parameters)
        self.device = self.parameters[0].device
        self._model, self._prompt, self._temperature = model, prompt, temperature

    def gradients(self, rollouts: Sequence[Rollout], credit: torch.Tensor) -> torch.Tensor:
        """Σ c ∇log π over all tokens of the responses, (C, P), for a credit (C, B, T)."""
        found = torch.zeros(len(credit), self.size, dtype=self.parameters[0].dtype, device=self.device)
        for rows in self._parts(rollouts):
            log_probs, _ = self.log_probs(rollouts[rows])
            for row, each in zip(found, credit[:, rows, : log_probs.shape[1]].to(log_probs), strict=True):
                loss = (each * log_probs).sum()
                row += _flat(torch.autograd.grad(loss, self.parameters, retain_graph=True, materialize_grads=True))
        return found

    def along(
        self, rollouts: Sequence[Rollout], direction: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """∇log π·direction, ‖∇_logits log π‖² and log π of each token, (B, T); direction: (P,)."""
        width = max(len(rollout.tokens) for rollout in rollouts)
        found = torch.zeros(3, len(rollouts), width, dtype=torch.float64)
        for rows in self._parts(rollouts):
            log_probs, norms = self.log_probs(rollouts[rows])
            # the derivative by the weights w of (∇ Σ w log π)·direction, which is linear in them
            weight = torch.zeros_like(log_probs, requires_grad=True)
            loss = (weight * log_probs).sum()
            gradient = torch.autograd.grad(loss, self.parameters, create_graph=True, materialize_grads=True)
            (slopes,) = torch.autograd.grad((_flat(gradient) * direction.to(log_probs)).sum(), weight)
            for place, values in enumerate((slopes, norms, log_probs.detach())):
                found[place, rows, : log_probs.shape[1]] = values.double().cpu()
        return found[0], found[1], found[2]

    def log_probs(self, rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
        """log π of each token with its graph, and ‖∇_logits log π‖² = 1 - 2 π + Σ π², (B, T), 0 behind a response."""
        prompts = [self._prompt(rollout.row) for rollout in rollouts]
        ids, mask = padded([[*prompt, *each.tokens] for prompt, each in zip(prompts, rollouts, strict=True)])
        tokens, alive = padded([rollout.tokens for rollout in rollouts])
        starts = torch.tensor([len(prompt) for prompt in prompts])[:, None]
        place = (starts - 1 + torch.arange(tokens.shape[1])).clamp(max=ids.shape[1] - 1)
        ids, mask, tokens, alive, place = (each.to(self.device) for each in (ids, mask, tokens, alive, place))
        logits = self._model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        every = logits.gather(1, place[..., None].expand(-1, -1, logits.shape[-1])) / self._temperature
        every = every.log_softmax(-1)
        chosen = every.gather(-1, tokens[..., None])[..., 0]
        with torch.no_grad():
            norms = 1 - 2 * chosen.exp() + every.exp().square().sum(-1)
        return torch.where(alive, chosen, 0.0), torch.where(alive, norms, 0.0)

    def _parts(self, rollouts: Sequence[Rollout]) -> Iterator[slice]:
        width = max(len(self._prompt(rollout.row)) + len(rollout.tokens) for rollout in rollouts)
        rows = max(1, MOST_LOGITS // (width * self._model.config.get_text_config().vocab_size))
        yield from (slice(start, start + rows) for start in range(0, len(rollouts), rows))


def load_policy(config: Any, prompt: Callable[[int], Sequence[int]], chosen: str) -> Policy:
    """The model of a run in float32, on the GPU where there is one."""
    from transformers import AutoModelForCausalLM

    settings = config.actor_rollout_ref
    trusted = bool(settings.model.get("trust_remote_code", False))
    # other kinds of attention have no second derivative, which `Policy.along` takes
    model: Any = AutoModelForCausalLM.from_pretrained(
        settings.model.path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trusted
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Policy(model.to(device).eval(), prompt, float(settings.rollout.temperature), chosen)


def parts_of(
    groups: Sequence[list[Rollout]],
    audited: int,
    step: int,
    methods: Sequence[Method],
    overlong: Overlong | None,
    seed: int,
) -> tuple[list[Part], dict[str, int]]:
    """Groups in parts of the size of a step, and of each scored method the number of its credit.

    The first `audited` groups get the methods' credits. Methods whose credits are equal share one.
    """
    parts: list[Part] = []
    columns: dict[str, list[torch.Tensor]] = {method.name: [] for method in methods if method.scored}
    audited = min(audited, len(groups))
    starts = [*range(0, audited, step), *range(audited, len(groups), step)]
    for start, end in itertools.pairwise([*starts, len(groups)]):
        rollouts = [rollout for group in groups[start:end] for rollout in group]
        ends = np.cumsum([0, *map(len, groups[start:end])]).tolist()
        rows = [slice(*pair) for pair in itertools.pairwise(ends)]
        batch = batch_of(rollouts, seed + start)
        verdicts = batch.correct.double().split([each.stop - each.start for each in rows])
        credit = torch.cat([(each - each.mean()) * len(each) / (len(each) - 1) for each in verdicts])
        parts.append(Part(rollouts, rows, (credit[:, None] * batch.response_mask)[None]))
        for method in methods if start < audited else ():
            if method.scored:
                columns[method.name].append(torch.from_numpy(credit_of(method, batch, overlong)))
    number: dict[str, int] = {}
    distinct: list[str] = []
    for name, column in columns.items():
        twin = next((other for other in distinct if all(map(torch.equal, column, columns[other]))), name)
        if twin == name:
            distinct.append(name)
        number[name] = 1 + distinct.index(twin)
    for place, part in enumerate(parts[: len(columns[BASELINE])]):
        every = [part.credits, *(columns[name][place][None] for name in distinct)]
        parts[place] = replace(part, credits=torch.cat(every))
    return parts, number


def measure(policy: Policy, parts: Sequence[Part], number: dict[str, int], advance: Advance) -> tuple[Products, float]:
    """All dot products, and the largest difference of log π from that of the rollouts.

    In Adam's metric products are weighted by 1 / the rms over whole steps of DAPO's step gradient in each coordinate.
    """
    sums, adam = _sums(policy, parts, number[BASELINE], advance)
    metrics = (1.0, adam)
    groups = [(part, rows) for part in parts for rows in part.groups]
    count, columns = len(groups), list(number.values())
    dots = {name: np.zeros((2, len(sums), count)) for name in PRODUCTS}
    where, tokens = np.zeros((2, len(sums), count, 2, DECILES)), np.zeros((3, 2, DECILES))
    entropies = [rollout.entropies for part in parts if len(part.credits) > 1 for rollout in part.rollouts]
    edges = np.quantile(np.concatenate(entropies), np.arange(1, DECILES) / DECILES)
    audited, differences = np.zeros(count, bool), []
    advance("products of gradients", 0, count)
    for k, (part, rows) in enumerate(groups):
        rollouts = part.rollouts[rows]
        credit = part.credits[:, rows, : max(len(rollout.tokens) for rollout in rollouts)]
        products, h = _dots(policy.gradients(rollouts, credit), sums, metrics)
        for name, values in products.items():
            dots[name][..., k] = values
        if len(credit) > 1:
            audited[k] = True
            slopes, norms, log_probs = policy.along(rollouts, (sums[0] - h) / (count - 1))
            given, _ = padded([rollout.log_probs for rollout in rollouts], torch.float64)
            differences.append(float((given - log_probs).abs().max()))
            _sort(rollouts, credit, slopes, norms, edges, where[:, :, k], tokens)
        advance("products of gradients", k + 1, count)
    mean = tokens / np.maximum(tokens[0], 1)
    found = Products(
        np.array(list(number)),
        audited,
        **{name: values[:, columns] for name, values in dots.items()},
        hh=dots["gg"][:, 0],  # h is the first of the credits
        hH=dots["gG"][:, 0],
        **dict(zip(("noise", "signal"), where[:, columns], strict=True)),
        tokens=tokens[0],
        norms=mean[1],
        entropies=mean[2],
    )
    return found, max(differences)


def _sums(policy: Policy, parts: Sequence[Part], baseline: int, advance: Advance) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each credit the sum of the gradients of all groups, (C, P), and the weights of Adam's metric (P,)."""
    sums = torch.zeros(max(len(part.credits) for part in parts), policy.size, dtype=torch.float64, device=policy.device)
    squares, step = torch.zeros_like(sums[0]), len(parts[0].groups)
    steps = sum(len(part.credits) > 1 and len(part.groups) == step for part in parts)
    advance("sums of gradients", 0, len(parts))
    for done, part in enumerate(parts, 1):
        found = policy.gradients(part.rollouts, part.credits)
        sums[: len(found)] += found
        if len(found) > 1 and len(part.groups) == step:
            squares += (found[baseline].double() / len(part.groups)) ** 2 / steps
        del found  # before the next, which is as large
        advance("sums of gradients", done, len(parts))
    return sums, _adam(squares.sqrt())


def _dots(
    every: torch.Tensor, sums: torch.Tensor, metrics: Sequence[torch.Tensor | float]
) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """Of a group's gradients, the first of which is h: their `PRODUCTS`, (2, C) each, and h in float64."""
    h = every[0].double()
    found = {name: np.zeros((len(metrics), len(sums))) for name in PRODUCTS}
    for metric, weight in enumerate(metrics):
        for column, single in enumerate(every):
            g = single.double()
            weighted = g * weight
            for name, other in (("gg", g), ("gG", sums[column]), ("gh", h), ("gH", sums[0])):
                found[name][metric, column] = float(weighted @ other)
        found["hG"][metric] = (sums @ (h * weight)).cpu().numpy()
    return found, h


def _adam(rms: torch.Tensor) -> torch.Tensor:
    """1 / rms (P,), 0 where no gradient ever was, at most the weight that one in a hundred exceeds."""
    known = rms > 0
    weight = torch.where(known, 1 / torch.where(known, rms, 1.0), 0.0)
    largest = weight[known].kthvalue(max(1, int(LARGEST_WEIGHT * int(known.sum())))).values
    return weight.clamp(max=float(largest))


def _sort(
    rollouts: Sequence[Rollout],
    credit: torch.Tensor,
    slopes: torch.Tensor,
    norms: torch.Tensor,
    edges: np.ndarray,
    where: np.ndarray,
    tokens: np.ndarray,
) -> None:
    """Add noise and signal of a group's tokens to their verdict and decile: where (2, C, 2, 10), tokens (3, 2, 10)."""
    for row, rollout in enumerate(rollouts):
        length, side = len(rollout.tokens), int(rollout.correct)
        entropies = np.array(rollout.entropies)
        c, slope, norm = (each[..., row, :length].numpy() for each in (credit, slopes, norms))
        place = np.searchsorted(edges, entropies, side="right")
        for decile in np.unique(place):
            here = place == decile
            where[0, : len(c), side, decile] += (c[:, here] ** 2 * norm[here]).sum(1)
            where[1, : len(c), side, decile] += (c[:, here] * slope[here]).sum(1)
            tokens[:, side, decile] += here.sum(), norm[here].sum(), entropies[here].sum()


def _flat(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])
