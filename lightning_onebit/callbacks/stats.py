"""``CompressionStats``: what compression saves and costs, in loggers, in the progress bar and in a table at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_onebit._names import shown_as
from lightning_onebit._say import below_bar, rank_zero_info
from lightning_onebit.callbacks._common import (
    WatchingCallback,
    column_group,
    everyone,
    misconfiguration,
    named_optimizers,
)
from lightning_onebit.comm import StepRecord, Transport, share_values
from lightning_onebit.engine.options import check_flag, check_integer
from lightning_onebit.engine.sharded import local_of
from lightning_onebit.metrics import SignAgreement

# So many columns of the table fit a terminal.
OPTIMIZERS_ABREAST = 4

# what is logged of the record of the last step, and of the sum of all, under these names
_PER_STEP = (
    "bytes_sent",
    "dense_bytes",
    "ratio",
    "collectives",
    "control_bytes",
    "communication_seconds",
    "compression_seconds",
)
_TOTAL = ("bytes_sent", "dense_bytes", "ratio", "communication_seconds", "compression_seconds")


def format_bytes(count: float) -> str:
    """A byte count for people, in decimal units: ``12.3MB``.

    Example:
        >>> format_bytes(12_345_678)
        '12.3MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}TB"


def format_ratio(ratio: float) -> str:
    """A compression ratio for people: ``28x``, ``4.6x``."""
    if math.isinf(ratio):
        return "nothing sent"
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


@dataclass
class _Watch:
    """What the callback knows of one optimizer."""

    name: str
    suffix: str
    optimizer: Any
    began: StepRecord  # the ledger's totals when this fit began
    began_steps: int
    logged: StepRecord | None  # of the last step that has been logged, or was made before this fit
    residual_at: int | None = None
    residuals: list[float] = field(default_factory=list)
    found: dict[str, float] = field(default_factory=dict)

    def column(self) -> dict[str, str]:
        """Of the table, with the names of its rows."""
        ledger, total = self.optimizer.ledger, self.optimizer.ledger.total
        return {
            "": self.name,
            "dense steps": f"{ledger.dense_steps:,}",
            "compressed steps": f"{ledger.compressed_steps:,}",
            "skipped steps": f"{self.optimizer.skipped_steps:,}",
            "sent": format_bytes(total.bytes_sent),
            "dense all-reduce": format_bytes(total.dense_bytes),
            "ratio": format_ratio(total.ratio),
            "waiting": f"{total.communication_seconds:.1f} s",
            "kernels": f"{total.compression_seconds:.1f} s",
        }

    def note(self, ranks: Transport) -> str:
        """What all ranks together have sent in this fit. A collective."""
        ledger, names = self.optimizer.ledger, ("bytes_sent", "dense_bytes", "communication_seconds")
        mine = [getattr(ledger.total, name) - getattr(self.began, name) for name in names]
        mine += [ledger.steps - self.began_steps, sum(self.residuals), len(self.residuals)]
        device = self.optimizer.param_groups[0]["params"][0].device
        rows = share_values(ranks, torch.tensor(mine, dtype=torch.float64, device=ranks.device(device)), "totals")
        sent, dense, seconds, steps, residuals, readings = rows.sum(dim=0).tolist()
        ratio = format_ratio(StepRecord(bytes_sent=int(sent), dense_bytes=int(dense)).ratio)
        note = f"{self.name}: all ranks together sent {format_bytes(sent)} in this fit, {ratio}"
        note += f"; waiting per step {1000 * seconds / max(1, steps):.3g} ms"
        return note + (f"; residual norm / momentum norm {residuals / readings:.3g}." if readings else ".")


@shown_as("CompressionStats")
class CompressionStatsMixin(WatchingCallback):
    """Reports what compression saves and what it costs, from the byte ledgers of the compressed optimizers.

    * Loggers: the names of docs/metrics.md, all starting with ``onebit/``, through ``LightningModule.log`` as often as
      ``Trainer(log_every_n_steps=...)`` says (and at the last batch of an epoch for ``trainer.callback_metrics``). With
      several compressed optimizers each name ends in the optimizer's number: ``onebit/bytes_sent/0``.
    * Progress bar: one item, ``sent=12.3MB 28x``: bytes this rank has sent so far and how many times less that is than
      dense all-reduces would have sent.
    * A table when fit ends.

    Bytes are those of one rank, as the ledger counts them. Numbers pass through Lightning as fp32: byte counts above
    16,777,216 are rounded to seven digits there, not in the table.

    Args:
        residual_every_n_steps: at least this many steps lie between two readings of the residual, which take a pass
            over its memory; it is read at compressed steps that are logged. None never reads it.
        sign_agreement_every_n_steps: the same for the agreement of the ranks' gradient signs, which gathers 64 KiB per
            rank (a collective). None (default) never measures it.
        trust_ratios_per_layer: with 1-bit LAMB, log the trust ratio of every tensor too, not only their smallest, mean and
            largest.
        progress_bar: add the item to the progress bar.
        summary: log the table when fit ends.

    Raises:
        TypeError: an option has the wrong type, or (at setup) the Trainer is from the other Lightning tree.
        ValueError: an interval is smaller than 1.
        MisconfigurationException: (when fitting starts) the strategy compresses nothing, or ``trust_ratios_per_layer`` is
            asked for and no optimizer has trust ratios.

    Example:
        >>> Trainer(strategy="onebit_adam", callbacks=[CompressionStats()])
    """

    def __init__(
        self,
        residual_every_n_steps: int | None = 50,
        *,
        sign_agreement_every_n_steps: int | None = None,
        trust_ratios_per_layer: bool = False,
        progress_bar: bool = True,
        summary: bool = True,
    ) -> None:
        super().__init__()
        check_integer("residual_every_n_steps", residual_every_n_steps, least=1, optional=True)
        check_integer("sign_agreement_every_n_steps", sign_agreement_every_n_steps, least=1, optional=True)
        check_flag("trust_ratios_per_layer", trust_ratios_per_layer)
        check_flag("progress_bar", progress_bar)
        check_flag("summary", summary)
        self.residual_every_n_steps = residual_every_n_steps
        self.sign_agreement_every_n_steps = sign_agreement_every_n_steps
        self.trust_ratios_per_layer = trust_ratios_per_layer
        self.progress_bar = progress_bar
        self.summary = summary

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses a fit without compressed optimizers, and trust ratios where no optimizer has any."""
        optimizers = [optimizer for _, optimizer in named_optimizers(self, trainer)]
        if self.trust_ratios_per_layer and not any(hasattr(optimizer, "get_lamb_coeffs") for optimizer in optimizers):
            kinds = ", ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
            raise misconfiguration(
                trainer,
                f"CompressionStats(trust_ratios_per_layer=True) needs 1-bit LAMB, but the optimizers are {kinds}: leave it out.",
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts watching the optimizers; by now a checkpoint's ledgers have been loaded. Bytes of earlier ones leave the totals."""
        self._release()
        self._watches = []
        optimizers = named_optimizers(self, trainer)
        for index, (name, optimizer) in enumerate(optimizers):
            suffix, ledger = f"/{index}" if len(optimizers) > 1 else "", optimizer.ledger
            self._watches.append(_Watch(name, suffix, optimizer, replace(ledger.total), ledger.steps, ledger.last))
        if self.progress_bar and trainer.progress_bar_callback is not None:
            self._add_to_bar(trainer.progress_bar_callback)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measures the agreement of the ranks' signs while ``.grad`` still holds the local gradients."""
        every = self.sign_agreement_every_n_steps
        for watch in self._watches if every is not None else ():
            stepping = optimizer is watch.optimizer or getattr(optimizer, "optimizer", None) is watch.optimizer
            # Before a dense step the gradients are averages already, the same on all ranks.
            if stepping and not watch.optimizer.next_step_is_dense and (watch.optimizer.steps + 1) % every == 0:
                parameters = [local_of(p) for group in watch.optimizer.param_groups for p in group["params"]]
                # of the ranks that exchange: of a sharded model those that hold the same elements
                agreement = SignAgreement(process_group=column_group(trainer))
                agreement = agreement.to(everyone(trainer, "CompressionStats").device(parameters[0].device))
                agreement.update(p.new_zeros(p.numel()) if p.grad is None else p.grad for p in parameters)
                watch.found["onebit/sign_agreement"] = float(agreement.compute())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs, if Lightning logs at this step and an optimizer has stepped."""
        if not (trainer.is_last_batch or trainer._logger_connector.should_update_logs):
            return
        values: dict[str, float] = {}
        for watch in self._watches:
            if (record := watch.optimizer.ledger.last) is not watch.logged:
                values |= {name + watch.suffix: value for name, value in self._values(watch, record).items()}
                watch.logged = record
        if values:
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends with the table."""
        if self.summary and self._watches:
            ranks = everyone(trainer, "CompressionStats")
            text = "\n".join([*_table(self._watches), *(watch.note(ranks) for watch in self._watches)])
            rank_zero_info(below_bar(trainer, text))
        self._release()

    def _values(self, watch: _Watch, record: StepRecord) -> dict[str, float]:
        optimizer, total = watch.optimizer, watch.optimizer.ledger.total
        intra = ("bytes_intra", "bytes_inter") if total.bytes_intra else ()
        values = {f"onebit/{name}": getattr(record, name) for name in (*_PER_STEP, *intra)}
        values |= {f"onebit/total_{name}": getattr(total, name) for name in _TOTAL}
        values |= {"onebit/dense_step": record.dense, "onebit/skipped_steps": optimizer.skipped_steps}
        every, last = self.residual_every_n_steps, watch.residual_at
        if every is not None and not record.dense and (last is None or optimizer.steps - last >= every):
            watch.residual_at = optimizer.steps
            values["onebit/residual_ratio"] = optimizer.residual_ratio()
            watch.residuals.append(values["onebit/residual_ratio"])
        values |= self._trust_ratios(optimizer) | watch.found
        watch.found.clear()
        # An infinite ratio (a step that sent nothing) would spoil every plot.
        return {name: float(value) for name, value in values.items() if math.isfinite(value)}

    def _trust_ratios(self, optimizer: Any) -> dict[str, float]:
        ratios: dict[str, float] = optimizer.get_lamb_coeffs() if hasattr(optimizer, "get_lamb_coeffs") else {}
        if not ratios:
            return {}
        mean = sum(ratios.values()) / len(ratios)
        values = {"_min": min(ratios.values()), "_mean": mean, "_max": max(ratios.values())}
        if self.trust_ratios_per_layer:
            values |= {f"/{name}": value for name, value in ratios.items()}
        return {f"onebit/trust_ratio{name}": value for name, value in values.items()}

    def _add_to_bar(self, bar: Any) -> None:
        # A logged metric can only be a number in the bar; `get_metrics` is where Lightning lets items be added.
        own, get_metrics = vars(bar).get("get_metrics"), bar.get_metrics

        def with_volume(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return {**get_metrics(*args, **kwargs), "sent": self._bar_item()}

        def restore() -> None:
            if own is None:
                del bar.get_metrics
            else:
                bar.get_metrics = own

        bar.get_metrics = with_volume
        self._undo.append(restore)

    def _bar_item(self) -> str:
        totals = [watch.optimizer.ledger.total for watch in self._watches]
        sent, dense = (sum(getattr(total, name) for total in totals) for name in ("bytes_sent", "dense_bytes"))
        return f"{format_bytes(sent)} {format_ratio(StepRecord(bytes_sent=sent, dense_bytes=dense).ratio)}"


def _table(watches: Sequence[_Watch]) -> list[str]:
    lines = ["Compression since the start of training (bytes of one rank):"]
    for first in range(0, len(watches), OPTIMIZERS_ABREAST):
        columns = [watch.column() for watch in watches[first : first + OPTIMIZERS_ABREAST]]
        cells = [list(columns[0]), *(list(column.values()) for column in columns)]
        widths = [max(map(len, column)) for column in cells]
        rows = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in zip(*cells, strict=True)
        ]
        lines += [rows[0], "-" * len(rows[0]), *rows[1:]]
    return lines
