"""The three sources of entropies, and what follows from each."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.entropy_source import SOURCES, entropy_source
from gtpo_verl.integrations.temporarily import temporarily


def run_with(source: str) -> DictConfig:
    return OmegaConf.create({"algorithm": {"entropy": {"source": source}}})


@pytest.mark.parametrize(
    ("name", "column", "from_rollout", "skips"),
    [
        ("actor", "entropy", False, False),
        ("rollout", "rollout_entropies", True, True),
        ("both", "entropy", True, False),
    ],
)
def test_what_a_source_means(name: str, column: str, from_rollout: bool, skips: bool) -> None:
    source = entropy_source(run_with(name))
    assert source is SOURCES[name]
    assert (source.column, source.from_rollout, source.skips_actor_pass) == (column, from_rollout, skips)


def test_an_unknown_source_is_refused_with_the_closest_name() -> None:
    with pytest.raises(
        UserError, match=r"source=rolout: no such source; did you mean rollout\? Choose one of: actor, rollout, both"
    ):
        entropy_source(run_with("rolout"))


# -------------------------------------------------------------------- temporary changes


def test_a_configuration_is_restored_also_when_the_block_fails() -> None:
    config = run_with("both")
    inside = []

    def fails() -> None:
        with temporarily(config.algorithm.entropy, "source", "actor"):
            inside.append(config.algorithm.entropy.source)
            raise RuntimeError("in verl")

    with pytest.raises(RuntimeError, match="in verl"):
        fails()
    assert inside == ["actor"]
    assert config.algorithm.entropy.source == "both"


def test_a_method_that_is_replaced_is_the_classs_again() -> None:
    path = _Folder()
    with temporarily(path, "name", lambda: "inside"):
        assert path.name() == "inside"
    assert path.name() == "class"
    assert vars(path) == {"place": Path()}


def test_an_attribute_of_the_object_gets_its_value_back() -> None:
    folder = _Folder()
    with temporarily(folder, "place", Path("/elsewhere")):
        assert folder.place == Path("/elsewhere")
    assert folder.place == Path()


class _Folder:
    def __init__(self) -> None:
        self.place = Path()

    def name(self) -> str:
        return "class"
