"""What a directory needs to look like a model in Hugging Face format, where nothing loads it."""

import json
from pathlib import Path


def write_model(directory: Path) -> Path:
    """Configuration, tokenizer, and a whole safetensors file of one number."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    places = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(places).to_bytes(8, "little") + places + bytes(4))
    return directory
