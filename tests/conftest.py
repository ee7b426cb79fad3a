"""Settings for every test process."""

import os

# Read when torch is first imported: with spinning threads, tests that share two cores take several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
