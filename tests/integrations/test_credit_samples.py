"""What is kept of a step for the report: which responses, and which of their tokens."""

import torch

from gtpo_verl.integrations.step.samples import MOST_TOKENS, contrasting_pairs, credit_sample


def decode(ids: list[int]) -> str:
    return "".join(chr(97 + number % 26) for number in ids)


def test_each_group_with_both_verdicts_gives_its_first_response_of_each():
    groups = ["a", "a", "b", "b", "b", "b"]
    correct = torch.tensor([True, True, False, False, True, True])
    own = torch.tensor([True, True, False, True, True, True])  # row 2 is the guide's
    assert contrasting_pairs(groups, groups, correct, own) == [(4, 3)]
    assert contrasting_pairs(groups[:2], groups[:2], correct[:2], own[:2]) == []


def test_groups_with_two_of_each_verdict_come_first_and_in_an_order_of_their_prompts():
    """The first group here has a wrong response alone, on which GTPO's credit is DAPO's."""
    groups = ["alone"] * 4 + ["x"] * 4 + ["y"] * 4
    correct = torch.tensor([True, True, True, False] + [True, False, True, False] * 2)
    own = torch.ones(12, dtype=torch.bool)
    found = contrasting_pairs(groups, groups, correct, own)
    assert found[2] == (0, 3)
    assert sorted(found[:2]) == [(4, 5), (8, 9)]
    # another run has the groups in another order, and keeps the same prompts first
    swapped = ["alone"] * 4 + ["y"] * 4 + ["x"] * 4
    first = swapped[contrasting_pairs(swapped, swapped, correct, own)[0][0]]
    assert first == groups[found[0][0]]


def test_tokens_of_a_tool_are_left_out_and_values_stay_with_their_tokens():
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)
    values = torch.arange(5.0)
    sample = credit_sample(decode, torch.tensor([0, 1, 2, 3]), values, values / 10, mask)
    assert sample == {
        "length": 3,
        "tokens": ["a", "c", "d"],
        "advantages": [0.0, 2.0, 3.0],
        "entropies": [0.0, 0.2, 0.3],
    }


def test_a_long_response_is_cut_and_its_length_is_kept():
    length = MOST_TOKENS + 5
    tokens, values = torch.zeros(length, dtype=torch.int64), torch.zeros(length)
    sample = credit_sample(decode, tokens, values, values, torch.ones(length, dtype=torch.bool))
    assert (len(sample["tokens"]), len(sample["advantages"]), sample["length"]) == (MOST_TOKENS, MOST_TOKENS, length)
