"""``python -m gtpo_verl.train``: the command ``gtpo-verl train``, for ``ray job submit``."""

import sys

from gtpo_verl.cli import main
from gtpo_verl.collector import rest_at_start

if __name__ == "__main__":
    rest_at_start()
    sys.exit(main(["train", *sys.argv[1:]]))
