"""Megatron-Core's fall-back Adam cannot resume: :func:`main` writes down how, as JSON.

Without Transformer Engine and Apex, Core takes torch's Adam. test_megatron.py calls this as it does drive_engines.py,
with the stand-in's Adam hidden. One rank of verl's engine saves after an update; a new engine
loads, as a resumed run does, and so does the one that saved.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]

import torch.distributed as dist  # noqa: E402
from drive_engines import Actor, batches, write_model  # noqa: E402
from megatron_harness import LAYOUTS  # noqa: E402


def counters(actor: Actor) -> list[Any]:
    """torch's counters of steps, one tensor for each parameter as it should be."""
    (optimizer,) = actor.engine.optimizer.chained_optimizers
    return [state["step"] for state in optimizer.optimizer.state.values()]


def main(out: str) -> None:
    directory = Path(out)
    write_model(directory / "model", tied=False)
    dist.init_process_group("cpu:gloo", f"file://{directory}/ranks", rank=0, world_size=1)
    make = partial(Actor, LAYOUTS["dp1"], "gtpo", directory / "model")
    batch = batches(directory / "model")["gtpo"]
    actor = make()
    actor.update(batch, 1)
    actor.engine.save_checkpoint(str(directory / "checkpoint"), global_step=1)
    found: dict[str, Any] = {"saved": {float(step) for step in counters(actor)}, "parameters": len(counters(actor))}
    try:
        make().engine.load_checkpoint(str(directory / "checkpoint"), del_local_after_load=False)
    except AssertionError as error:
        found["new_engine"] = error.__traceback__ and _last(error.__traceback__)
    actor.engine.load_checkpoint(str(directory / "checkpoint"), del_local_after_load=False)
    found["counters"] = len({id(step) for step in counters(actor)})
    actor.update(batch, 1)
    found["after_an_update"] = {float(step) for step in counters(actor)}
    (directory / "found.json").write_text(json.dumps(found, default=sorted))


def _last(traceback: Any) -> str:
    """The function in which an exception was raised."""
    while traceback.tb_next:
        traceback = traceback.tb_next
    return str(traceback.tb_frame.f_code.co_qualname)
