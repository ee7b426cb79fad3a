"""What a directory needs to look like a model in Hugging Face format, where nothing loads its weights."""

import json
from pathlib import Path


def write_model(directory: Path) -> Path:
    """Configuration, tokenizer, and a whole safetensors file of one number."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    places = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(places).to_bytes(8, "little") + places + bytes(4))
    return directory
