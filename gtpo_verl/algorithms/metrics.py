"""Metrics of credit assignment from the advantages that a run trains on, whatever estimator made them."""

import torch

from gtpo_verl.algorithms._packed.layout import check_batch, check_tokens, one_thread, read_layout
from gtpo_verl.algorithms._packed.recorder import Recorder
from gtpo_verl.algorithms._packed.tokens import Workspace, check_entropies


def credit_metrics(
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    correct: torch.Tensor,
    entropy: torch.Tensor,
) -> dict[str, float]:
    """The metrics of `Recorder` that need no estimator, and the spread of the advantages inside responses.

    advantages, entropy (nats): (B, T). response_mask: (B, T) bool or 0/1. group: (B,) integers. correct: (B,) bool.
    Returns, beside counts, entropies and the share of degenerate groups: `sign_flip_correct` and `sign_flip_wrong`,
    shares of the tokens of either polarity whose advantage contradicts the verdict; `advantage_spread`, the standard
    deviation of the advantages inside a response, averaged over responses: 0 where credit is per response.
    Raises ValueError for shapes that disagree and entropies that are not finite or negative.
    """
    check_batch(response_mask, group, correct=correct)
    check_tokens(entropy, response_mask)
    with torch.no_grad(), one_thread(advantages.device):
        layout = read_layout(response_mask, group, correct)
        recorder = Recorder(layout)
        workspace = Workspace(layout, response_mask, torch.float64)
        entropy_rows, advantage_rows = entropy.unbind(0), advantages.unbind(0)
        spreads, flips, tokens = [], [0.0, 0.0], [0, 0]
        for members in layout.groups:
            H = workspace.load(members, entropy_rows)
            recorder.entropies(members, check_entropies(H, entropy, response_mask))
            A = workspace.load(members, advantage_rows)
            flips[0] += (A.correct.values < 0).sum().item()
            flips[1] += (A.wrong.values > 0).sum().item()
            tokens = [count + len(side.values) for count, side in zip(tokens, (A.correct, A.wrong), strict=True)]
            spreads += [(row - row[0]).std(correction=0) for row in (*A.correct.rows, *A.wrong.rows)]
        found = recorder.metrics()
        found["sign_flip_correct"], found["sign_flip_wrong"] = (
            flipped / max(count, 1) for flipped, count in zip(flips, tokens, strict=True)
        )
        if spreads:
            found["advantage_spread"] = torch.stack(spreads).mean().item()
        return found
