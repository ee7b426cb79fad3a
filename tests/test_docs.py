"""The documentation builds without a warning and asks no other host for anything; what it says to type is right."""

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

import gtpo_verl.algorithms
from gtpo_verl.cli import COMMANDS, main
from gtpo_verl.config import compose_config, parse_overrides

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.name not in ("commands.md", "configuration.md"))


def blocks(language: str, *pages: Path) -> Iterator[str]:
    for page in pages or PAGES:
        yield from re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every command of the shell blocks, without comments and ellipses."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    words = [[word for word in shlex.split(line, comments=True) if word != "..."] for line in lines]
    return sorted({shlex.join(line) for line in words if line})


# ------------------------------------------------------------------------------------------------------------ the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("site")
    strict = ("--fail-on-warning", "--keep-going", "--nitpicky", "--quiet")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, DOCS, output], capture_output=True, text=True, cwd=ROOT
    )
    assert (built.returncode, built.stderr) == (0, "")
    return output


@pytest.mark.slow
def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    """Links may lead elsewhere; scripts, styles, fonts and pictures may not come from there."""
    pages = [path.read_text() for path in site.rglob("*.html")]
    assert len(pages) > 40
    loaded = r"<(?:script|img|iframe|source|video|object|embed)\b[^>]*?(?:src|srcset|data)=\"(?:https?:)?//"
    linked = r"<link\b(?![^>]*rel=\"(?:canonical|author|search)\")[^>]*href=\"(?:https?:)?//"
    for page in pages:
        assert re.search(loaded, page) is None
        assert re.search(linked, page) is None
    for style in site.rglob("*.css"):
        assert re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text()) is None


@pytest.mark.slow
def test_equations_are_typeset_by_the_browser(site: Path) -> None:
    page = (site / "reference" / "equations.html").read_text()
    assert page.count('display="block"') >= 8
    assert "\\frac" not in page
    assert re.search(r"<script[^>]*(mathjax|katex)", page, re.IGNORECASE) is None


@pytest.mark.slow
def test_links_inside_the_site_lead_to_pages_and_headings(site: Path) -> None:
    broken = []
    for page in site.rglob("*.html"):
        for target, anchor in re.findall(r"href=\"(?![a-z]+:|//)([^\"#?]*)[^\"#]*(?:#([^\"]*))?\"", page.read_text()):
            file = (page.parent / target).resolve() if target else page
            if not file.exists():
                broken.append(f"{page.name}: {target}")
            elif anchor and file.suffix == ".html" and f'id="{anchor}"' not in file.read_text():
                broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []


@pytest.mark.slow
def test_the_search_knows_the_pages_and_both_looks_are_there(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    assert all(name in index for name in ("guides/dynamic-sampling", "reference/commands", "inside/glossary"))
    assert 'class="theme-toggle' in (site / "index.html").read_text()


@pytest.mark.slow
def test_every_command_has_a_section_and_every_public_name_an_entry(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text()
    assert all(f'id="{name}"' in page for name in COMMANDS)
    page = (site / "reference" / "api.html").read_text()
    assert all(f'id="gtpo_verl.algorithms.{name}"' in page for name in gtpo_verl.algorithms.__all__)
    page = (site / "reference" / "configuration.html").read_text()
    assert all(key in page for key in ("guards.stall_timeout", "algorithm.gtpo.alpha2", "trainer.run_dir"))


# -------------------------------------------------------------------------------------------------- what one types


@pytest.mark.parametrize("line", [line for line in commands() if re.match(r"make |scripts/|recipe/|sbatch ", line)])
@pytest.mark.slow
def test_a_documented_script_or_target_exists_and_its_overrides_compose(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert words[1] in targets
        return
    script = next(word for word in words if word.startswith(("scripts/", "recipe/")))
    assert (ROOT / script).is_file()
    compose_config([word for word in words if re.match(r"[\w.+]+=", word)])


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("gtpo-verl ")])
@pytest.mark.slow
def test_a_documented_command_parses_and_its_overrides_compose(line: str) -> None:
    words = shlex.split(line)[1:]
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"gtpo_verl.commands.{words[0].replace('-', '_')}").add_arguments(parser)
    args, rest = parser.parse_known_args(words[1:])
    assert not [word for word in rest if word.startswith("-")]
    overrides = [*getattr(args, "overrides", []), *rest]
    if words[0] == "quickstart":
        overrides = ["setting=quickstart", *overrides]
    if words[0] == "sweep":  # the first value of every axis
        kept = [item for item in parse_overrides(overrides) if item.key_or_group.partition(".")[0] != "sweep"]
        overrides = [_first(item) for item in kept]
    if overrides:
        compose_config(overrides)


def _first(item: "gtpo_verl.config.Override") -> str:
    if not item.is_sweep_override():
        return str(item.input_line)
    return f"{item.key_or_group}={next(iter(item.sweep_string_iterator()))}"


@pytest.mark.slow
def test_gsm8k_becomes_a_training_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial's lines on rows in GSM8K's form."""
    monkeypatch.chdir(tmp_path)
    files = tmp_path / "data" / "gsm8k" / "main"
    files.mkdir(parents=True)
    rows = [("Two and two?", "2 + 2 = <<2+2=4>>4\n#### 4"), ("A thousand and one?", "Easily counted.\n#### 1,001")]
    for split, used in (("train", rows), ("test", rows[:1])):
        frame = pd.DataFrame(used, columns=["question", "answer"])
        frame.to_parquet(files / f"{split}-00000-of-00001.parquet")
    tutorial = DOCS / "start" / "node.md"
    (convert,) = blocks("python", tutorial)
    exec(compile(convert, tutorial.name, "exec"), {})
    for line in commands():
        if line.startswith("gtpo-verl prepare-data parquet data/gsm8k-val"):
            assert main(shlex.split(line)[1:]) == 0
    for line in commands():
        if line.startswith("gtpo-verl prepare-data parquet data/gsm8k-train"):
            assert main(shlex.split(line)[1:]) == 0
    (row,) = pd.read_parquet("data/gsm8k-train.parquet").to_dict("records")  # the other one is in the validation file
    assert row["reward_model"]["ground_truth"] == "1001"
    assert row["data_source"] == "gsm8k"
    assert "\\boxed" in row["prompt"][0]["content"]


def test_the_ten_lines_run_and_credit_has_the_sign_of_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python", DOCS / "reference" / "api.md")
    names: dict[str, object] = {}
    exec(compile(code, "api.md", "exec"), names)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0].isalpha()] == [
        "dapo",
        "gtpo",
        "grpo_s",
    ]
    batch = names["batch"]
    assert isinstance(batch, gtpo_verl.algorithms.Batch)
    advantages = gtpo_verl.algorithms.algorithm("gtpo").advantages(batch).advantages
    assert (advantages[:2][batch.response_mask[:2]] > 0).all()
    assert (advantages[2:] < 0).all()


def test_the_rule_of_the_verifiers_page_gives_a_verdict() -> None:
    (code,) = blocks("python", DOCS / "guides" / "verifiers.md")
    names: dict = {}
    exec(compile(code, "verifiers.md", "exec"), names)
    assert names["compute_score"]("mine", "so it is 42", "42") == {"score": 1.0, "acc": 1.0, "pred": "so it is 42"}
    assert names["compute_score"]("mine", "no idea", "42")["acc"] == 0.0


@pytest.mark.slow
def test_the_notebook_runs_and_gives_what_is_stored_in_it() -> None:
    path = DOCS / "reference" / "credit.ipynb"
    stored = nbformat.read(path, as_version=4)
    again = nbformat.read(path, as_version=4)
    NotebookClient(
        again, timeout=300, iopub_timeout=120, startup_timeout=300, resources={"metadata": {"path": path.parent}}
    ).execute()
    for before, after in zip(stored.cells, again.cells, strict=True):
        assert _output(before) == _output(after)


def _output(cell: nbformat.NotebookNode) -> str:
    """What a cell shows, without warnings, which name files. A busy kernel sends what it prints in several pieces."""
    shown = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
    return "".join(output.get("text") or output["data"].get("text/html", "") for output in shown)
