"""The report as a whole: what is written, what it says, and what it refuses."""

import argparse
import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from gtpo_verl.algorithms.registry import algorithm
from gtpo_verl.commands import report
from gtpo_verl.errors import UserError
from gtpo_verl.report import figures
from gtpo_verl.report.page import print_table, write_report


class Page(HTMLParser):
    """The visible text of a page, its images, and every address it would load."""

    def __init__(self, path: Path):
        super().__init__()
        self.text = ""
        self.images: list[bytes] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self._hidden = 0
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "source", "link", "br"):
            self.open.append(tag)
        self._hidden += tag == "style"
        for key, value in attrs:
            if key in ("src", "srcset", "href"):
                self.addresses.append(value)
            if key == "src" and tag == "img":
                self.images.append(base64.b64decode(value.removeprefix("data:image/png;base64,"), validate=True))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._hidden -= tag == "style"

    def handle_data(self, data):
        if not self._hidden:
            self.text += f" {data}"


def render(report_) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_table(report_, console)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def written(tmp_path_factory, run_writer):
    """The report of a complete run, written once for the tests that only look at it."""
    path = run_writer(tmp_path_factory.mktemp("outputs")).run()
    return write_report([path], path)


@pytest.mark.slow
def test_the_page_is_one_file_that_loads_nothing(written):
    page = Page(written.html)
    assert page.open == []
    assert len(page.images) == 9
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    source = re.sub(
        r"data:image/png;base64,[A-Za-z0-9+/=]+", "", written.html.read_text()
    )  # where any four letters occur
    assert "http" not in source
    assert "<script" not in source
    assert "prefers-color-scheme: dark" in source


def test_the_page_shows_the_figures_of_the_directory_in_both_themes(written):
    directory = written.html.parent / "figures"
    names = {path.name for path in directory.iterdir()}
    assert {"accuracy.png", "entropy.png", "response_length.png", "sign_flips.png", "step_time.png"} <= names
    assert {name.replace(".png", "-dark.png") for name in names if "dark" not in name} <= names
    page = Page(written.html)
    on_disk = {path.read_bytes() for path in directory.iterdir() if "dark" not in path.name}
    assert set(page.images) == on_disk
    light, dark = imread(directory / "entropy.png"), imread(directory / "entropy-dark.png")
    assert light.shape == dark.shape
    assert light[0, 0, :3].min() > 0.9
    assert dark[0, 0, :3].max() < 0.2


def test_every_arm_is_drawn_in_its_colour(written):
    picture = imread(written.html.parent / "figures" / "accuracy.png")[..., :3]
    for style in (algorithm(name).style for name in ("dapo", "gtpo", "grpo_s")):
        colour = np.array([int(style.light[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(picture - colour).max(axis=-1) < 0.01).sum() > 2_000


def test_the_page_says_what_the_summary_says(written):
    text = Page(written.html).text
    summary = json.loads(written.summary.read_text())
    assert summary["schema"] == 3
    assert [arm["method"] for arm in summary["arms"]] == ["dapo", "gtpo", "grpo_s"]
    trainings = [training for arm in summary["arms"] for training in arm["trainings"]]
    for training in trainings:
        (source,) = training["sources"].values()
        change = source["change"]
        interval = change["difference"]["interval"]
        assert source["verdict"] in text
        assert f"{100 * change['before']:.1f} % {100 * change['after']:.1f} %" in text
        assert f"{100 * interval['low']:+.1f} to {100 * interval['high']:+.1f}" in text
        assert change["samples"] == [1_000, 1_000]
        assert change["prompts"] == 500
        assert [point["step"] for point in source["curve"]] == [0, 10, 20, 30, 40, 50, 60]
    gain = [one["sources"]["arithmetic"]["change"]["difference"]["value"] for one in trainings]
    assert summary["over_prompts"][0]["gain"]["value"] == pytest.approx(gain[1] - gain[0])
    assert summary["over_seeds"] == {"final": [], "comparisons": []}
    assert "over seeds" not in text


def test_the_page_tells_how_it_was_run(written):
    text = Page(written.html).text
    for expected in (
        "gtpo-verl quickstart --output outputs/quickstart",
        "2 CPU cores, 8 GiB",
        "verl 0.9.1",
        "seed 7",
        "algorithm.adv_estimator grpo gtpo grpo_s",
        "not the training seed",
        "The model was warm-started on demonstrations",
        "Not logged by DAPO: credit/sign_flip_correct, credit/sign_flip_wrong.",
    ):
        assert expected in text


def test_table_fits_a_terminal_of_eighty_columns(written):
    table = render(written)
    rows = [line for line in table.splitlines() if line.strip().startswith(("DAPO", "GTPO", "GRPO-S"))]
    assert len(rows) == 3
    assert re.search(r"GTPO +\d\d\.\d % +\d\d\.\d % +\+\d\d\.\d +\+\d\d\.\d to \+\d\d\.\d +1,000 +500 +60", table)
    assert str(written.html) in table


@pytest.mark.slow
def test_an_interrupted_run_is_said_so_at_the_top(runs):
    path = runs.run(arms=["dapo", "gtpo"], planned=["dapo", "gtpo", "grpo_s"], status="interrupted", bare=True)
    result = write_report([path], path)
    text = Page(result.html).text
    assert text.index("quickstart was interrupted, so this report is partial") < text.index("Accuracy")
    assert "arm grpo_s logged no step, so it is not shown" in text
    assert "quickstart was interrupted" in render(result)


def test_what_was_not_logged_is_named_and_no_figure_of_another_report_stays(runs):
    path = runs.run(arms=["gtpo"], bare=True)
    (path / "figures").mkdir()
    for name in ("sign_flips.png", "sign_flips-dark.png", "of_somebody_else.png"):
        (path / "figures" / name).touch()
    result = write_report([path], path)
    assert sorted(p.name for p in (path / "figures").iterdir()) == [
        "accuracy-dark.png",
        "accuracy.png",
        "of_somebody_else.png",
        "pass_at_k-dark.png",
        "pass_at_k.png",
    ]
    text = Page(result.html).text
    assert "Sign flips: no arm logged credit/sign_flip_correct, credit/sign_flip_wrong." in text
    assert "Step time by phase: no arm logged timing_s/step." in text


def test_verls_own_log_of_one_training_is_enough(tmp_path):
    log = tmp_path / "project" / "mine.jsonl"
    log.parent.mkdir()
    log.write_text('{"step": 1, "data": {"actor/entropy": 0.5, "critic/score/mean": 0.1}}\n')
    arguments = argparse.ArgumentParser()
    report.add_arguments(arguments)
    assert report.run(arguments.parse_args([str(log)])) == 0
    text = Page(tmp_path / "project" / "mine-report" / "report.html").text
    assert "No validation accuracy was logged" in text
    assert "Mine shows actor/entropy for all responses." in text
    assert "command, versions and hardware are not known" in text


@pytest.mark.slow
def test_several_data_sources_are_never_pooled(runs):
    """AIME rises, MATH falls: each has its verdict, rows, panel and table, and nothing mentions all 530 prompts."""
    path = runs.run(arms=["dapo", "gtpo"], sources=("aime", "math"), gains=(1.5, -0.8), prompts=530, bare=True)
    result = write_report([path], path)
    text = Page(result.html).text
    for source, word in (("aime", "a clear gain on 265 prompts"), ("math", "a clear loss on 265 prompts")):
        assert re.search(rf"{source} .*?{word}", text)
        assert re.search(rf"GTPO {source} \d", text)
        assert re.search(rf"GTPO − DAPO {source} 60 ", text)
        assert f"quickstart, {source}" in render(result)
    assert "530 prompts" not in text
    summary = json.loads(result.summary.read_text())
    assert [comparison["source"] for comparison in summary["over_prompts"]] == ["aime", "math"]
    assert {len(one["sources"]) for arm in summary["arms"] for one in arm["trainings"]} == {2}
    assert [panel.title for panel in figures._accuracy_panels(result.arms)] == ["aime", "math"]


@pytest.mark.slow
def test_runs_side_by_side(runs, monkeypatch):
    first, second = (runs.run(name, arms=[arm], bare=True) for name, arm in (("first", "dapo"), ("second", "gtpo")))
    monkeypatch.chdir(runs.root.parent)
    arguments = argparse.ArgumentParser()
    report.add_arguments(arguments)
    assert report.run(arguments.parse_args([str(first), str(second)])) == 0
    page = Page(Path("outputs/report-first-second/report.html"))
    assert "first · second" in page.text
    assert "GTPO − DAPO" in page.text


def test_text_of_a_run_cannot_become_markup(runs):
    path = runs.run(arms=["gtpo"], bare=True)
    record = json.loads((path / "run.json").read_text())
    record |= {"name": "<b>bold</b>", "command": "train 'a<b' && echo <script>alert(1)</script>"}
    (path / "run.json").write_text(json.dumps(record))
    result = write_report([path], path)
    assert "<script" not in result.html.read_text()
    assert "echo <script>alert(1)</script>" in Page(result.html).text


def test_an_output_that_cannot_be_written_is_a_plain_error(runs, tmp_path):
    path = runs.run(arms=["gtpo"], bare=True)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the report to .*file.*: choose another --output"):
        write_report([path], tmp_path / "file")
