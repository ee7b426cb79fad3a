"""The description on PyPI, made from README.md: pyproject.toml has everything else."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def description(readme: str, source: str | None) -> str:
    """README without what a package index cannot show: pictures of the repository, and links into it.

    Args:
        readme: Markdown.
        source: the repository's address; links into it become absolute, or plain text where there is none.
    """
    readme = re.sub(r"<picture>.*?</picture>\n*", "", readme, flags=re.DOTALL)
    target = rf"[\1]({source}/blob/main/\2)" if source else r"\1"
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)", target, readme)


project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
setup(
    long_description=description((ROOT / "README.md").read_text(), project["urls"].get("Source")),
    long_description_content_type="text/markdown",
)
