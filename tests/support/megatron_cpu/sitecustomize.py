"""Python imports a module of this name at its start: every process with this directory on PYTHONPATH runs Megatron on
its CPU, the workers of Ray included. tests/support/megatron_harness.py puts it there.
"""

import megatron_on_cpu

megatron_on_cpu.install()
