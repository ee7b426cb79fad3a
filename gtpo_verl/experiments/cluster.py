"""What a job proves of its cluster before it trains: every node has the plugin that was carried, and its needs."""

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

from packaging.requirements import Requirement

import gtpo_verl
from gtpo_verl.errors import UserError
from gtpo_verl.experiments.handover import fingerprint
from gtpo_verl.versions import check_verl, installed_version


def prove_cluster(plugin: str, run_dir: Path) -> None:
    """Check on every node that a worker of this job uses the carried plugin, by its `fingerprint`, and a supported
    verl, and that all nodes see one run directory; prints one line.

    UserError: one does not, in one line that names the node.
    """
    from gtpo_verl.integrations.nodes import joined, on_every_node, prove_shared

    with joined():
        found = on_every_node(check_node, plugin)
        prove_shared(run_dir)
    print(
        f"Plugin gtpo_verl {gtpo_verl.__version__} ({plugin}) on {len(found)} node{'s' * (len(found) > 1)}: "
        f"{next(iter(found.values()))}.",
        flush=True,
    )


def check_node(plugin: str) -> str:
    """The versions of Python and verl in this process, a worker of the job.

    Import, metadata and entry points must lead to the package that was carried, whatever is installed. What it requires
    must be installed: it was carried without its dependencies.

    UserError: it is not the carried plugin that is imported here, or verl or a requirement does not fit.
    """
    verl = check_verl()
    package = Path(next(iter(gtpo_verl.__path__)))
    if fingerprint(package) != plugin:
        raise UserError(f"gtpo_verl is imported from {package}, which is not what was submitted: uninstall it there.")
    version = installed_version("gtpo-verl")
    if version != gtpo_verl.__version__:
        raise UserError(f"gtpo_verl {gtpo_verl.__version__} was submitted, and metadata of {version} is found first.")
    for group in ("verl.plugins", "vllm.general_plugins"):
        found = [point for point in importlib.metadata.entry_points(group=group) if point.name == "gtpo_verl"]
        specs = [importlib.util.find_spec(point.module) for point in found]
        if not specs or any(spec is None or not Path(str(spec.origin)).is_relative_to(package) for spec in specs):
            raise UserError(f"the entry point gtpo_verl of {group} is not the submitted one: {found}.")
    missing = []
    for text in importlib.metadata.requires("gtpo-verl") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"'{requirement.name}{requirement.specifier}'")
    if missing:
        raise UserError(f"gtpo-verl's requirements are not met there: pip install {' '.join(missing)} on every node.")
    return f"Python {platform.python_version()}, verl {verl}"
