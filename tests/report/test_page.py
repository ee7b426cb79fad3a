"""The report as a whole: what is written, what it says, and what it refuses."""

import argparse
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from gtpo_verl.commands import report
from gtpo_verl.errors import UserError
from gtpo_verl.report.page import print_table, write_report


class Page(HTMLParser):
    """The visible text of a page, the charts in it, and every address it would load."""

    def __init__(self, path: Path):
        super().__init__()
        self.text = ""
        self.addresses: list[str] = []
        self.open: list[str] = []
        self._hidden = 0
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "source", "link", "br"):
            self.open.append(tag)
        self._hidden += tag in ("style", "script")
        for key, value in attrs:
            if key in ("src", "srcset") or (key == "href" and tag == "link"):
                self.addresses.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._hidden -= tag in ("style", "script")

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


def charts_of(path: Path) -> dict:
    return json.loads(re.search(r'id="charts">(.*)</script>', path.read_text(encoding="utf-8"))[1])


def test_the_page_is_one_file_that_loads_nothing(written):
    page = Page(written.html)
    assert page.open == []
    assert page.addresses == []
    assert len(charts_of(written.html)) == 18
    assert written.html.stat().st_size < 2_000_000
    assert "prefers-color-scheme: dark" in written.html.read_text()


def test_every_figure_is_a_png_for_both_themes(written):
    directory = written.html.parent / "figures"
    names = {path.name for path in directory.iterdir()}
    assert {"accuracy.png", "entropy.png", "response_length.png", "sign_flips.png", "step_time.png"} <= names
    assert {name.replace(".png", "-dark.png") for name in names if "dark" not in name} <= names
    with Image.open(directory / "entropy.png") as light, Image.open(directory / "entropy-dark.png") as dark:
        assert light.size == dark.size
        assert min(light.convert("RGB").getpixel((0, 0))) > 230
        assert max(dark.convert("RGB").getpixel((0, 0))) < 51


def test_the_charts_have_the_values_of_the_summary(written):
    (curves,) = (chart["data"]["values"] for name, chart in charts_of(written.html).items() if "accuracy" in name)
    summary = json.loads(written.summary.read_text())
    for arm, curve in zip(summary["arms"], curves, strict=True):
        points = arm["trainings"][0]["sources"]["arithmetic"]["curve"]
        assert curve["arm"] == arm["name"]
        assert curve["x"] == [point["step"] for point in points]
        assert curve["y"] == pytest.approx([point["accuracy"] for point in points], rel=1e-4)


def test_one_seed_is_said_to_be_no_comparison(written):
    text = Page(written.html).text
    assert text.index("One seed: this is not a comparison.") < text.index("points since the first validation")
    _, between = text.split("Between arms", 1)
    assert "95 % interval" not in between.split("Accuracy by cost")[0]


def test_what_is_common_and_what_differs_stands_above_the_figures(written):
    text = Page(written.html).text
    common, figures = text.index("What all arms have in common"), text.index("Share of validation responses")
    assert common < text.index("Settings that differ between the arms") < figures
    assert "responses a prompt 8" in text
    assert "learning rate 0.0003" in text


def test_responses_over_time_are_of_prompts_that_nobody_chose(written):
    text = Page(written.html).text
    assert re.search(r"What is 0 \+ 0\? DAPO , step 0: \w+ = 1 DAPO , step 30: \w+ = 1 DAPO , step 60", text)


def test_the_page_says_what_the_summary_says(written):
    text = Page(written.html).text
    summary = json.loads(written.summary.read_text())
    assert summary["schema"] == 4
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
    assert summary["over_seeds"] == {"endpoint": "mean", "final": [], "comparisons": [], "unfinished": []}
    assert "over seeds" not in text


def test_the_page_tells_how_it_was_run(written):
    text = Page(written.html).text
    for expected in (
        "gtpo-verl quickstart --output outputs/quickstart",
        "2 CPU cores, x86_64",
        "verl 0.9.1",
        "baseline accuracy 0.450",
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
    said = "Not complete: grpo_s logged no step; dapo was interrupted after step 60 of 60"
    assert text.index(said) < text.index("Validation accuracy")
    assert said in " ".join(render(result).split())


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
    assert [panel.title for panel in result.figures[0].panels] == ["aime", "math"]


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
    record = json.loads((path / "sweep.json").read_text())
    record |= {"name": "<b>bold</b>", "command": "train 'a<b' && echo <script>alert(1)</script>"}
    (path / "sweep.json").write_text(json.dumps(record))
    result = write_report([path], path)
    assert "<script>alert" not in result.html.read_text()
    assert "echo <script>alert(1)</script>" in Page(result.html).text


def test_an_output_that_cannot_be_written_is_a_plain_error(runs, tmp_path):
    path = runs.run(arms=["gtpo"], bare=True)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the report to .*file.*: choose another --output"):
        write_report([path], tmp_path / "file")
