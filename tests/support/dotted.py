"""Configurations as dotted keys."""

from omegaconf import DictConfig, OmegaConf


def dotted(node: object, prefix: str = "") -> dict[str, object]:
    """Dotted keys to values: interpolations as written, lists whole; an empty section is a value."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=False)
    if not isinstance(node, dict) or (prefix and not node):
        return {prefix.rstrip("."): node}
    return {key: value for name, part in node.items() for key, value in dotted(part, f"{prefix}{name}.").items()}
