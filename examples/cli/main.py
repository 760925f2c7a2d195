"""The text model of ``examples/text_gpt.py`` under LightningCLI.

    python examples/cli/main.py fit --config examples/cli/onebit_adam.yaml
    python examples/cli/main.py fit --config examples/cli/class_path.yaml
    python examples/cli/main.py fit --config examples/cli/onebit_adam.yaml --optimizer lightning_onebit.OnebitAdam

Needs ``pip install lightning-onebit[cli]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from text_gpt import TextData, TextGPT

try:
    from lightning.pytorch.cli import LightningCLI
except ModuleNotFoundError:
    from pytorch_lightning.cli import LightningCLI  # type: ignore[assignment]


def main() -> None:
    """Parse the command line, then fit, validate or test."""
    LightningCLI(TextGPT, TextData, seed_everything_default=1, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
