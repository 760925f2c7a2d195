"""transformers.Trainer and Accelerate train with compressed optimizers: one call, the same replicas, fewer bytes, exact resumption.

All runs happen in one pair of processes, for importing transformers takes longer than all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_ddp import Heard, same_everywhere, weights
from torch import Tensor

from lightning_onebit import LocalSteps, OnebitAdam, OnebitLamb, ZeroOneAdam

MISSING = [name for name in ("transformers", "accelerate", "peft") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
STEPS, SAVED = 8, 5


# ----- the processes -----------------------------------------------------------------------------------------------------


def own_network(rank: int, folder: str) -> bool:
    """Moves both processes into a network of their own, in which nobody else's bytes are counted; False where that is not allowed."""
    libc, new = ctypes.CDLL(None, use_errno=True), 0x40000000  # CLONE_NEWNET
    told: list[Any] = [None]
    if rank == 0 and libc.unshare(new) == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # ip link set lo up
            fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 0x1))
        told = [os.getpid()]
    dist.broadcast_object_list(told)
    if told[0] is None:
        return False
    if rank:
        with open(f"/proc/{told[0]}/ns/net") as file:
            assert libc.setns(file.fileno(), new) == 0
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return True


def sent() -> int:
    """Bytes that this network has carried."""
    with open("/proc/thread-self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def prepare(rank: int, world: int, folder: str) -> bool:
    counted = own_network(rank, folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true", TRANSFORMERS_VERBOSITY="error"
    )
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    return counted


# ----- models and data, made from nothing ----------------------------------------------------------------------------------


def bert(**options: Any) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(3)
    return BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=32, **{**SIZE, **options}))


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **{**sizes, **options}))


def adapters() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    return get_peft_model(
        gpt2(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    )


def sentences(count: int = 64) -> list[dict[str, Tensor]]:
    drawn = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in drawn]


# ----- Trainer -------------------------------------------------------------------------------------------------------------


def trainer(
    folder: str, model: Any, *, optimizer: Any = None, made_by: Any = None, steps: int = STEPS, **options: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    chosen = {"per_device_train_batch_size": 4, "max_steps": steps, "save_strategy": "no", "report_to": [], **options}
    args = TrainingArguments(
        output_dir=folder,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
        dataloader_pin_memory=False,
        **chosen,
    )
    how = {"optimizers": (optimizer, None)} if optimizer is not None else {}
    if made_by is not None:
        how = {"optimizer_cls_and_kwargs": made_by}
    return Trainer(model, args, train_dataset=sentences(), eval_dataset=sentences(8), **how)


def inner(trainer: Any) -> Any:
    return trainer.optimizer.optimizer


ADAM = (OnebitAdam, {"lr": 1e-3, "weight_decay": 0.01, "freeze_step": 3})
LOCAL = (ZeroOneAdam, {"lr": 1e-3, "freeze_step": 3, "local_steps": LocalSteps(max_gap=4, double_every=1)})
#: model, optimizer, options of the arguments
RUNS: dict[str, Any] = {
    "gpt2, accumulated, bf16": (gpt2, ADAM, {"gradient_accumulation_steps": 2, "bf16": True}),
    "bert": (bert, (OnebitLamb, {"lr": 1e-3, "freeze_step": 3}), {"ddp_find_unused_parameters": False}),
    # saved in the midst of local steps
    "lora": (adapters, LOCAL, {"eval_strategy": "steps", "eval_steps": 2}),
    "local steps": (gpt2, LOCAL, {}),
    "bf16 weights": (lambda: gpt2().to(torch.bfloat16), ADAM, {}),
}


def train_and_resume(rank: int, folder: str) -> dict[str, Any]:
    from lightning_onebit.huggingface import onebit_trainer

    told = {}
    for name, (make, made_by, options) in RUNS.items():
        heard, where = Heard(), f"{folder}/{name}"
        # a Trainer changes the arguments it is given
        whole = onebit_trainer(
            trainer(
                where,
                make(),
                made_by=(made_by[0], dict(made_by[1])),
                save_strategy="steps",
                save_steps=SAVED,
                **options,
            )
        )
        whole.train()
        optimizer = inner(whole)
        assert type(optimizer) is made_by[0]
        assert (optimizer.ledger.dense_steps, optimizer.ledger.compressed_steps) == (3, STEPS - 3), name
        ended = weights(whole.model)
        assert same_everywhere([w.float() for w in ended]), name
        norms = [entry["grad_norm"] for entry in whole.state.log_history if "grad_norm" in entry]
        box = [norms]
        dist.broadcast_object_list(box)
        assert len(norms) == STEPS and box == [norms], "ranks have clipped by different norms"
        assert heard.lines == [], name
        again = onebit_trainer(trainer(where, make(), made_by=(made_by[0], dict(made_by[1])), **options))
        again.train(resume_from_checkpoint=f"{where}/checkpoint-{SAVED}")
        assert heard.lines == [], name
        assert inner(again).steps == STEPS
        told[name] = {
            "trained": bool(any(not torch.equal(a, b) for a, b in zip(ended, weights(make()), strict=True))),
            "resumed": all(map(torch.equal, ended, weights(again.model))),
        }
    # what cannot be restored is said, once
    dist.barrier()
    if rank == 0:
        shutil.rmtree(f"{where}/checkpoint-{SAVED}/residuals.json.onebit")
    dist.barrier()
    again = onebit_trainer(trainer(where, gpt2().to(torch.bfloat16), made_by=(ADAM[0], dict(ADAM[1]))))
    again.train(resume_from_checkpoint=f"{where}/checkpoint-{SAVED}")
    told["gone"] = list(heard.lines)
    return told


def misuse(folder: str) -> None:
    from lightning_onebit.huggingface import onebit_trainer

    with pytest.raises(TypeError, match=r"the trainer's optimizer is AdamW"):
        onebit_trainer(trainer(folder, gpt2())).train()
    model = gpt2()
    clips = OnebitAdam(model.parameters(), lr=1e-3, freeze_step=3, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"set max_grad_norm=0 in TrainingArguments"):
        onebit_trainer(trainer(folder, model, optimizer=clips)).train()
    # without the call both would average, and the optimizer's own control of replicas has nothing to say
    allowed = onebit_trainer(trainer(folder, model, optimizer=clips, max_grad_norm=0.0, steps=5))
    allowed.train()
    assert [r.get("grad_norm") is not None for r in allowed.state.log_history][:5] == [True] * 5
    assert clips.ledger.last.control_collectives == 1


def measure(folder: str) -> dict[str, float]:
    """Bytes that the network has carried in a compressed step and in one of plain DDP, and what the ledger says."""
    from transformers import TrainerCallback

    from lightning_onebit.huggingface import onebit_trainer

    bytes_at: list[int] = []

    class Count(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            dist.barrier()
            bytes_at.append(sent())

    told: dict[str, float] = {}
    logged: list[dict[str, float]] = []
    for name in ("ddp", "onebit"):
        model = gpt2(n_embd=128, vocab_size=512)
        made = OnebitAdam(model.parameters(), lr=1e-3, freeze_step=1) if name == "onebit" else None
        run = trainer(folder, model, optimizer=made, steps=6, ddp_find_unused_parameters=False, max_grad_norm=0.0)
        run.add_callback(Count())
        if made is not None:
            onebit_trainer(run)
        bytes_at.clear()

        class Logger(TrainerCallback):  # type: ignore[misc]
            """As TensorBoard's and wandb's callbacks, which a Trainer has from the beginning."""

            def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
                logged.append(dict(logs))

        run.callback_handler.callbacks.insert(2, Logger())
        run.train()
        told[name] = (bytes_at[-1] - bytes_at[2]) / 3
    entry = [logs for logs in logged if "loss" in logs][-1]
    assert entry["onebit/bytes_sent"] == inner(run).ledger.last.bytes_sent and entry["onebit/dense_step"] == 0
    assert entry["onebit/total_ratio"] > 1
    told["ledger"] = 2 * inner(run).ledger.last.bytes_sent
    told["gradients"] = 4 * sum(p.numel() for p in model.parameters())
    return told


# ----- Accelerate ----------------------------------------------------------------------------------------------------------


def accelerate(rank: int, folder: str) -> dict[str, Any]:
    from accelerate import Accelerator

    from lightning_onebit.huggingface import onebit_accelerate

    def run(first: int, steps: int, *, resume: bool, save: int | None = None) -> tuple[list[Tensor], Any]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        gaps = LocalSteps(max_gap=4, double_every=1)
        optimizer = ZeroOneAdam(model.parameters(), lr=1e-3, freeze_step=3, local_steps=gaps)
        model, wrapper = accelerator.prepare(model, optimizer)
        onebit_accelerate(accelerator, model)
        if resume:
            accelerator.load_state(folder)
        rows = torch.stack([s["input_ids"] for s in sentences(16 * STEPS)]).view(STEPS, 2, 2, 4, 16)
        for step in range(first, steps):
            if step == save:
                accelerator.save_state(folder)
            for part in rows[step]:
                with accelerator.accumulate(model):
                    accelerator.backward(model(input_ids=part[rank], labels=part[rank]).loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                        box = [float(norm)]
                        dist.broadcast_object_list(box)
                        assert box[0] == norm > 0.1, (box, norm)
                    wrapper.step()
                    wrapper.zero_grad()
        optimizer.synchronise()
        assert same_everywhere(weights(model))
        return weights(model), optimizer

    heard = Heard()
    whole, optimizer = run(0, STEPS, resume=False, save=SAVED)
    assert optimizer.ledger.dense_steps == 3
    again, _ = run(SAVED, STEPS, resume=True)
    quiet = list(heard.lines)
    if rank == 0:
        os.remove(f"{folder}/residuals.json")
    dist.barrier()
    run(SAVED, STEPS, resume=True)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match=r"no optimizer of lightning_onebit was prepared"):
        onebit_accelerate(accelerator)
    model, _ = accelerator.prepare(bert(), OnebitAdam(bert().parameters(), freeze_step=1))
    with pytest.raises(ValueError, match=r"OnebitAdam trains none of the 1 models"):
        onebit_accelerate(accelerator, model)
    return {"resumed": all(map(torch.equal, whole, again)), "quiet": quiet, "gone": heard.lines}


# ----- the example ---------------------------------------------------------------------------------------------------------


def example() -> str:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import transformers_trainer

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        transformers_trainer.main(["--steps", "10", "--width", "32"])
    return printed.getvalue()


# ----- tests ---------------------------------------------------------------------------------------------------------------


def everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    counted = prepare(rank, world, folder)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return {
            "trainer": train_and_resume(rank, f"{folder}/trainer"),
            "misuse": misuse(f"{folder}/misuse"),
            "bytes": measure(f"{folder}/bytes") if counted else None,
            "accelerate": accelerate(rank, f"{folder}/accelerate"),
            "example": example(),
        }


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(everything, 2, str(tmp_path_factory.mktemp("huggingface")), timeout=170)


@pytest.mark.parametrize("run", list(RUNS))
def test_a_trainer_trains_and_resumes_bit_for_bit(told: list[dict[str, Any]], run: str) -> None:
    for rank in told:
        assert rank["trainer"][run] == {"trained": True, "resumed": True}


def test_a_trainer_says_once_that_residuals_are_gone(told: list[dict[str, Any]]) -> None:
    first, second = (rank["trainer"]["gone"] for rank in told)
    assert len(first) == 1 and "which start from zero" in first[0] and "rank-00000-of-00002.pt is missing" in first[0]
    assert second == []


def test_accelerate_trains_clips_alike_and_resumes_bit_for_bit(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["accelerate"]["resumed"] and rank["accelerate"]["quiet"] == []
    first, second = (rank["accelerate"]["gone"] for rank in told)
    assert len(first) == 1 and "residuals.json is missing" in first[0] and second == []


def test_the_example_of_a_trainer_trains(told: list[dict[str, Any]]) -> None:
    assert "replicas identical" in told[0]["example"]
    assert "2 dense and 8 compressed steps" in told[0]["example"]


def test_the_interface_carries_what_the_ledger_says_and_a_tenth_of_ddp(told: list[dict[str, Any]]) -> None:
    facts = told[0]["bytes"]
    if facts is None:
        pytest.skip("this machine does not let us make a network of our own")
    print(json.dumps(facts))
    assert facts["ddp"] > 2 * facts["gradients"]
    # besides: headers, the control round, the barrier of the measurement and the loss that the Trainer gathers
    assert facts["ledger"] <= facts["onebit"] < facts["ledger"] + 0.01 * facts["ddp"] + 20_000
    assert facts["onebit"] < facts["ddp"] / 10


def test_the_package_imports_none_of_them() -> None:
    program = "import sys, lightning_onebit.ddp, lightning_onebit.huggingface\n"
    program += f"assert not set({['transformers', 'accelerate', 'peft']!r}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
