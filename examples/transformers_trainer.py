"""A Hugging Face model under ``transformers.Trainer``, with 1-bit Adam: one more call.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py
    python examples/transformers_trainer.py                 # the same: starts torchrun itself
    python examples/transformers_trainer.py --steps 400 --out run --resume

A small GPT-2 learns the source text of the Python standard library, byte by byte. Clipping (``max_grad_norm=1.0`` is the Trainer's
default), accumulation, evaluation and checkpoints are the Trainer's. Needs ``pip install transformers accelerate``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from data import VOCABULARY, load_corpus

from lightning_onebit import OnebitAdam
from lightning_onebit.huggingface import onebit_trainer

WINDOW = 128


def windows(text: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Texts of ``WINDOW`` bytes, as the Trainer takes them."""
    rows = text[: len(text) // WINDOW * WINDOW].view(-1, WINDOW).long()
    return [{"input_ids": row, "labels": row} for row in rows]


def train(chosen: argparse.Namespace, folder: str) -> None:
    """What every rank runs."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"n_embd": chosen.width, "n_layer": 2, "n_head": 4, "n_positions": WINDOW, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
    training, validation = map(windows, load_corpus(1 << 20, 32 << 10))
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=chosen.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=chosen.steps // 10,
        save_steps=max(1, chosen.steps // 2),
        logging_steps=max(1, chosen.steps // 10),
        ddp_find_unused_parameters=False,  # GPT-2 uses all: one small all-reduce less
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    options: dict[str, Any] = {"lr": chosen.lr, "weight_decay": 0.01, "freeze_step": max(1, chosen.steps // 5)}
    trainer = Trainer(
        model,
        arguments,
        train_dataset=training,
        eval_dataset=validation,
        optimizer_cls_and_kwargs=(OnebitAdam, options),
    )
    onebit_trainer(trainer)  # the one line that is not in every such program
    trainer.train(resume_from_checkpoint=chosen.resume)

    loss = trainer.evaluate()["eval_loss"]
    accelerated: Any = trainer.optimizer  # Accelerate's, around that of this library
    ledger = accelerated.optimizer.ledger
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    copies = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, weights)
    if dist.get_rank() == 0:
        identical = all(torch.equal(copies[0], other) for other in copies)
        print(f"validation loss {loss:.3f}, replicas {'identical' if identical else 'DIFFERENT'}")
        print(
            f"{ledger.dense_steps} dense and {ledger.compressed_steps} compressed steps, "
            f"{ledger.ratio:.1f}x fewer bytes than dense all-reduces"
        )


def main(arguments: list[str] | None = None) -> None:
    """Train on the ranks there are, or start torchrun where there is none."""
    options = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--steps", type=int, default=200, help="optimizer steps")
    options.add_argument("--width", type=int, default=128, help="of the model")
    options.add_argument("--lr", type=float, default=3e-3, help="learning rate")
    options.add_argument("--out", help="folder for checkpoints; none are kept without it")
    options.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = options.parse_args(arguments)
    if chosen.resume and chosen.out is None:
        options.error("--resume needs --out")
    if "RANK" not in os.environ:
        from torch.distributed.run import main as torchrun

        torchrun(["--standalone", "--nproc-per-node", "2", __file__, *arguments])
        return
    with tempfile.TemporaryDirectory() as mine:
        if chosen.out is not None:
            train(chosen, chosen.out)
            return
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available())  # joins the ranks
        folder = [mine]
        dist.broadcast_object_list(folder)  # all ranks use rank 0's folder
        train(chosen, folder[0])
        dist.barrier()


if __name__ == "__main__":
    main()
