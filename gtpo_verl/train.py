"""``python -m gtpo_verl.train``: the command ``gtpo-verl train``, for ``ray job submit``."""

import sys

from gtpo_verl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
