"""``python -m lightning_onebit``: the console script, for torchrun and where the script is not on the path."""

from lightning_onebit.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
