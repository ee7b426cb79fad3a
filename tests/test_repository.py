"""What surrounds the package: changelog, citation, description, workflows. None of it runs anywhere but here."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools
import yaml

import gtpo_verl

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def releases() -> dict[str, str]:
    """The sections of the changelog by version."""
    parts = re.split(r"^## \[([^]]+)\].*$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_changelog_has_this_version_and_a_page_for_each() -> None:
    assert next(iter(releases())) == gtpo_verl.__version__
    for version, text in releases().items():
        assert len(text.split()) < 700, version
        headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
        assert headings == [name for name in ("Added", "Changed", "Removed", "Fixed") if name in headings], version


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == gtpo_verl.__version__
    assert citation["authors"] == [{"name": "gtpo_verl contributors"}]
    assert citation["references"][0]["url"] == "https://arxiv.org/abs/2508.04349"


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of setup.py, and under `given` what it hands to setuptools."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: given.update(kwargs))
    return runpy.run_path(str(ROOT / "setup.py")) | {"given": given}


def test_links_into_the_repository_become_text_or_absolute(setup_py: dict[str, Any]) -> None:
    picture = "<picture>\n  <img src='x.png'>\n</picture>\n\n"
    readme = f"[a](docs/a.md) [b](https://b) [c](#c) ![d](d.png)\n{picture}end [e\nf](LICENSE)"
    text = setup_py["description"](readme, None)
    assert text == "a [b](https://b) [c](#c) ![d](d.png)\nend e\nf"
    text = setup_py["description"](readme, "https://host/project")
    assert text.startswith("[a](https://host/project/blob/main/docs/a.md) [b](https://b) [c](#c)")
    assert text.endswith("[e\nf](https://host/project/blob/main/LICENSE)")


def test_the_description_is_readme(setup_py: dict[str, Any]) -> None:
    assert setup_py["given"]["long_description"].startswith("# gtpo_verl\n")
    assert setup_py["given"]["long_description_content_type"] == "text/markdown"


GENERATED = ("commands.md", "configuration.md")  # by docs/generate.py; tests/test_docs.py follows links to them


def test_every_link_of_the_repositorys_pages_leads_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "recipe" / "README.md"]
    broken = []
    for page in pages:
        prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", prose):
            if Path(target).name not in GENERATED and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_results_carry_no_path_of_the_machine_they_were_measured_on() -> None:
    files = [file for place in ("benchmarks", "docs") for file in (ROOT / place).glob("results/**/*") if file.is_file()]
    texts = {file.name: file.read_text() for file in files if file.suffix in (".json", ".md")}
    assert len(texts) > 20
    path = re.compile(r"(?:^|[\s(\"'`=])/[\w.-]+/[\w./-]+", re.MULTILINE)
    assert {name: path.findall(text) for name, text in texts.items() if path.search(text)} == {}


# -------------------------------------------------------------------- workflows


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_that_there_are_and_is_given_little(workflow: Path) -> None:
    document = yaml.safe_load(workflow.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {target for step in steps(workflow) for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))}
    assert called <= targets
    assert document["permissions"] == {"contents": "read"}
    for name, job in document["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
        assert set(job.get("permissions", {})) <= {"id-token"}, name
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_the_workflows_do_what_continuous_integration_does_here() -> None:
    ci = re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    runs = [step.get("run", "") for step in steps(ROOT / ".github" / "workflows" / "checks.yml")]
    assert {f"make {target}" for target in ci} <= set(runs)


def test_a_tag_is_published_without_a_secret_and_only_if_it_is_the_version() -> None:
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    assert "secrets." not in text
    document = yaml.safe_load(text)
    assert document[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as a truth value
    assert document["jobs"]["pypi"]["needs"] == "build"
    assert document["jobs"]["pypi"]["permissions"] == {"id-token": "write"}
    checked = " ".join(step.get("run", "") for step in document["jobs"]["build"]["steps"])
    assert 'version="${GITHUB_REF_NAME#v}"' in checked
    assert "twine check --strict" in checked


def test_forms_are_well_formed() -> None:
    for form in ("bug.yml", "method.yml"):
        document = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text())
        assert {"name", "description", "body"} <= document.keys()
        ids = [field["id"] for field in document["body"]]
        assert len(ids) == len(set(ids))
        assert all(field["attributes"]["label"] for field in document["body"])
