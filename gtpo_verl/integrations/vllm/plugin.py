"""Entry point of the group ``vllm.general_plugins``: vLLM calls ``register`` in front end, engine and every worker."""

import os

from gtpo_verl.integrations.vllm import ENV_FLAG


def register() -> None:
    """Patch the samplers of this process if ``GTPO_VERL_ROLLOUT_ENTROPY=1``; otherwise do nothing.

    The import is inside the function, because vLLM swallows errors of loading a plugin but not errors of calling it.

    Raises UserError: the installed vLLM cannot be patched.
    """
    if os.environ.get(ENV_FLAG) != "1":
        return
    from gtpo_verl.integrations.vllm.patch import install

    install()
