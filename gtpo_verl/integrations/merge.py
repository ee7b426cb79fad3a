"""The shards of an FSDP checkpoint as one model in Hugging Face format, by verl's merger but in the precision that is
asked for: verl's rounds weights to bfloat16, and the updates of a small learning rate are less than the rounding.

    python -m gtpo_verl.integrations.merge LOCAL_DIR TARGET_DIR DTYPE
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger, merge_non_dtensor_shards


class PreciseFSDPModelMerger(FSDPModelMerger):
    def __init__(self, config: ModelMergerConfig, dtype: str):
        super().__init__(config)
        self.dtype = dtype

    def _load_and_merge_state_dicts(
        self, world_size: int, total_shards: int, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
    ) -> dict[str, torch.Tensor]:
        names = (f"model_world_size_{world_size}_rank_{rank}.pt" for rank in range(total_shards))
        folder = Path(str(self.config.local_dir))
        shards = [torch.load(folder / name, map_location="cpu", mmap=True, weights_only=False) for name in names]
        return {name: self._merged(name, [shard[name] for shard in shards]) for name in sorted(shards[0])}

    def _merged(self, name: str, parts: list[Any]) -> torch.Tensor:
        if not isinstance(parts[0], DTensor):
            return self._converted(merge_non_dtensor_shards(name, parts))
        placement = parts[0].placements[-1]  # of (replicas, shards), or of the shards alone
        return self._merge_by_placement([self._converted(part.to_local()) for part in parts], placement)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(getattr(torch, self.dtype)) if tensor.is_floating_point() else tensor

    def save_hf_model_and_tokenizer(self, state_dict: dict[str, torch.Tensor]) -> None:
        super().save_hf_model_and_tokenizer(state_dict)
        file = Path(str(self.config.target_dir)) / "config.json"
        settings = json.loads(file.read_text()) | {"dtype": self.dtype}  # transformers loads weights in this one
        file.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    local_dir, target_dir, dtype = sys.argv[1:]
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=local_dir,
        target_dir=target_dir,
        hf_model_config_path=str(Path(local_dir, "huggingface")),
    )
    merger = PreciseFSDPModelMerger(config, dtype)
    merger.merge_and_save()
    merger.cleanup()


if __name__ == "__main__":
    main()
