"""Draw images/credit.svg, the picture of the README: what DAPO and GTPO make of two answers of a real step.

    python docs/credit_picture.py

The step is reference/step.pt; reference/credit.ipynb explains it.
"""

from html import escape
from pathlib import Path

import torch

from gtpo_verl.algorithms import Batch, GTPOConfig, algorithm, gtpo_advantages
from gtpo_verl.tasks.model import build_tokenizer

HERE = Path(__file__).parent
CELL, LINE, LEFT = 26, 24, 92  # pixels
STYLE = """
text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; }
.name { font: 13px system-ui, sans-serif; fill: #59636e; }
.bar { fill: #0969da; } .more { fill: #1a7f37; } .less { fill: #cf222e; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; } .name { fill: #9198a1; }
  .bar { fill: #4493f8; } .more { fill: #3fb950; } .less { fill: #f85149; }
}"""


def strip(
    top: int, name: str, values: torch.Tensor, tokens: list[str], largest: float, colours: str | None
) -> list[str]:
    """One row of cells, as strong as their values are large."""
    parts = [f'<text class="name" x="0" y="{top + 17}">{escape(name)}</text>']
    for place, (value, token) in enumerate(zip(values.tolist(), tokens, strict=True)):
        left, strength = LEFT + place * CELL, min(abs(value) / largest, 1)
        kind = colours or ("more" if value > 0 else "less")
        parts.append(
            f'<rect class="{kind}" x="{left}" y="{top}" width="{CELL - 2}" height="{LINE - 3}" rx="3" '
            f'fill-opacity="{0.85 * strength:.2f}"/>'
            f'<text x="{left + CELL / 2 - 1}" y="{top + 15}" text-anchor="middle">{escape(token)}</text>'
        )
    return parts


def main() -> None:
    step = torch.load(HERE / "reference" / "step.pt", weights_only=True)
    group = torch.tensor([int(key.split("_")[0].split("-")[1]) for key in step["keys"]])
    mask, correct, H = step["response_mask"], step["correct"], step["entropy"].double()
    A = gtpo_advantages(H, correct, mask, group, GTPOConfig(entropy_floor=1e-3)).advantages
    dapo = algorithm("dapo").advantages(Batch(mask, group, correct, rewards=step["rewards"].sum(-1))).advantages
    decode = build_tokenizer().decode
    mean = (A * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    inside = (A - mean) * mask
    chosen = [
        max(
            (row for row in range(len(A)) if bool(correct[row]) is verdict),
            key=lambda row: float(inside[row].abs().max()),
        )
        for verdict in (True, False)
    ]
    largest = float(inside[chosen].abs().max())
    parts, top = [], 4
    for row in chosen:
        tokens = [decode([int(token)]) if int(token) > 1 else "·" for token in step["responses"][row][mask[row]]]
        verdict = "a right answer" if correct[row] else "a wrong answer"
        advantage = float(dapo[row][mask[row]][0])
        title = f"{verdict} to {decode(step['prompts'][row]).strip()}: DAPO gives every token {advantage:+.2f}"
        parts.append(f'<text class="name" x="{LEFT}" y="{top + 13}">{escape(title.replace("-", "−"))}</text>')
        top += 22
        parts += strip(top, "entropy", H[row][mask[row]], tokens, 1.0, "bar")
        parts += strip(top + LINE, "A of GTPO*", inside[row][mask[row]], tokens, largest, None)
        top += 2 * LINE + 14
    width = LEFT + CELL * int(mask[chosen].sum(1).max())
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}">'
    (HERE / "images" / "credit.svg").write_text("\n".join([picture, f"<style>{STYLE}</style>", *parts, "</svg>", ""]))


if __name__ == "__main__":
    main()
