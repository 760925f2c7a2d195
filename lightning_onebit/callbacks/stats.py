"""``CompressionStats``: what compression saves and costs, in loggers, in the progress bar and in a table at the end."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torchmetrics import Metric

from lightning_onebit._names import shown_as
from lightning_onebit._say import below_bar, rank_zero_info
from lightning_onebit.callbacks._common import (
    check_count,
    check_flag,
    check_trainer,
    compressed_optimizers,
    loss_of,
    misconfiguration,
    optimizer_name,
    set_up_anew,
)
from lightning_onebit.comm import StepRecord
from lightning_onebit.metrics import (
    CommunicationTime,
    CommunicationVolume,
    CompressionRatio,
    ResidualNorm,
    SignAgreement,
)

#: Every metric name and what it means; "per step" is the optimizer step that was last made. docs/metrics.md says more.
METRICS: dict[str, str] = {
    "onebit/bytes_sent": "bytes this rank sent in the step",
    "onebit/bytes_intra": "of those, bytes to ranks of the same node (hierarchical exchange only)",
    "onebit/bytes_inter": "of those, bytes to other nodes (hierarchical exchange only)",
    "onebit/dense_bytes": "bytes a dense ring all-reduce of the same gradients would have sent in the step",
    "onebit/ratio": "dense_bytes / bytes_sent of the step (left out in a step that sends nothing)",
    "onebit/collectives": "collectives for gradients or momentum in the step",
    "onebit/control_bytes": "bytes of the step's control round (norms, non-finite flags, presence of gradients)",
    "onebit/communication_seconds": "seconds this rank was blocked waiting for collectives in the step",
    "onebit/compression_seconds": "seconds this rank spent in compression kernels in the step",
    "onebit/dense_step": "1 if the step averaged gradients densely, 0 if it was compressed",
    "onebit/residual_ratio": "norm of this rank's worker residual over the norm of the momentum",
    "onebit/sign_agreement": "share of coordinates where the signs of all ranks' local gradients agree",
    "onebit/trust_ratio_min": "smallest trust ratio of any tensor in the step (1-bit LAMB)",
    "onebit/trust_ratio_mean": "mean trust ratio over tensors in the step (1-bit LAMB)",
    "onebit/trust_ratio_max": "largest trust ratio of any tensor in the step (1-bit LAMB)",
    "onebit/trust_ratio": "trust ratio of one tensor, whose name follows after a slash (1-bit LAMB, on request)",
    "onebit/total_bytes_sent": "bytes this rank has sent since the start of training",
    "onebit/total_dense_bytes": "bytes dense ring all-reduces would have sent since the start of training",
    "onebit/total_ratio": "total_dense_bytes / total_bytes_sent",
    "onebit/total_communication_seconds": "seconds blocked waiting for collectives since the start of training",
    "onebit/total_compression_seconds": "seconds spent in compression kernels since the start of training",
    "onebit/skipped_steps": "steps skipped because of a non-finite gradient since the start of training",
}

FIGURE_NAME = "onebit_compression.png"

# A figure needs no more points than it has pixels; beyond this every other point is dropped.
MAX_HISTORY = 4096

# So many columns of the table fit a terminal.
OPTIMIZERS_ABREAST = 4

_SUMS = tuple(item.name for item in fields(StepRecord) if item.name not in ("step", "phase", "dense"))


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
    fresh: StepRecord | None = None
    counted: StepRecord = field(default_factory=StepRecord)
    counted_steps: int = 0
    residual_at: int | None = None
    handle: Any = None
    volume: CommunicationVolume = field(default_factory=CommunicationVolume)
    ratio: CompressionRatio = field(default_factory=CompressionRatio)
    time: CommunicationTime = field(default_factory=CommunicationTime)
    residual: ResidualNorm = field(default_factory=ResidualNorm)
    agreement: SignAgreement = field(default_factory=SignAgreement)
    found: dict[str, float] = field(default_factory=dict)
    history: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, Metric]:
        return {"volume": self.volume, "ratio": self.ratio, "time": self.time, "residual": self.residual}

    def count(self) -> None:
        """Feeds the metrics with what the ledger has summed since the last call: once per log, not once per step."""
        ledger = self.optimizer.ledger
        now = {name: getattr(ledger.total, name) for name in _SUMS}
        new = StepRecord(**{name: value - getattr(self.counted, name) for name, value in now.items()})
        self.volume.update(new)
        self.ratio.update(new)
        self.time.update(new, ledger.steps - self.counted_steps)
        self.counted, self.counted_steps = StepRecord(**now), ledger.steps


@shown_as("CompressionStats")
class CompressionStatsMixin:
    """Reports what compression saves and what it costs, from the byte ledgers of the compressed optimizers.

    * Loggers: the names of docs/metrics.md, all starting with ``onebit/``, through ``LightningModule.log`` as often as
      ``Trainer(log_every_n_steps=...)`` says (and at the last batch of an epoch for ``trainer.callback_metrics``). With
      several compressed optimizers each name ends in the optimizer's number: ``onebit/bytes_sent/0``.
    * Progress bar: one item, ``sent=12.3MB 28x``: bytes this rank has sent so far and how many times less that is than
      dense all-reduces would have sent.
    * A table when fit ends, and on request a figure beside the logs.

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
        figure: draw volume, ratio, residual and loss against bytes when fit ends, into ``onebit_compression.png`` in
            ``trainer.log_dir`` (with loggers that keep all runs in one folder, such as W&B and MLflow, in the run's folder
            of it, ``<name>/<version>``), or into the file named here.

    Raises:
        TypeError: an option has the wrong type, or (at setup) the Trainer is from the other Lightning tree.
        ValueError: an interval is smaller than 1, or ``figure`` is an empty name.
        ModuleNotFoundError: ``figure`` is asked for and matplotlib is not installed.
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
        figure: bool | str = False,
    ) -> None:
        super().__init__()
        if residual_every_n_steps is not None:
            check_count(
                "residual_every_n_steps", residual_every_n_steps, remedy="give a number of steps, or None for never"
            )
        if sign_agreement_every_n_steps is not None:
            remedy = "give a number of steps, or None for never"
            check_count("sign_agreement_every_n_steps", sign_agreement_every_n_steps, remedy=remedy)
        check_flag("trust_ratios_per_layer", trust_ratios_per_layer)
        check_flag("progress_bar", progress_bar)
        check_flag("summary", summary)
        if not isinstance(figure, str):
            check_flag("figure", figure)
        elif not figure:
            raise ValueError("`figure=''` names no file: give a path, True for a file beside the logs, or False.")
        if figure:
            _figure_class()
        self.residual_every_n_steps = residual_every_n_steps
        self.sign_agreement_every_n_steps = sign_agreement_every_n_steps
        self.trust_ratios_per_layer = trust_ratios_per_layer
        self.progress_bar = progress_bar
        self.summary = summary
        self.figure = figure
        self._watches: list[_Watch] = []
        self._restore_bar: Callable[[], None] | None = None

    @property
    def metrics(self) -> list[dict[str, Metric]]:
        """Per compressed optimizer the metrics of this fit (``volume``, ``ratio``, ``time``, ``residual``), for plots."""
        return [watch.metrics for watch in self._watches]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses a Trainer of the other Lightning tree and a strategy that compresses nothing."""
        if stage == "fit":
            check_trainer(self, trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses a fit without compressed optimizers, and trust ratios where no optimizer has any."""
        optimizers = compressed_optimizers(self, trainer)
        if self.trust_ratios_per_layer and not any(hasattr(optimizer, "get_lamb_coeffs") for optimizer in optimizers):
            kinds = ", ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
            raise misconfiguration(
                trainer,
                f"CompressionStats(trust_ratios_per_layer=True) needs 1-bit LAMB, but the optimizers are {kinds}: leave it out.",
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Watches the new optimizers where the program has set them up anew; the bytes of earlier ones leave the totals."""
        if set_up_anew(trainer, [watch.optimizer for watch in self._watches]):
            self.on_train_start(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Starts watching the optimizers; by now a checkpoint's ledgers have been loaded."""
        self._release()
        optimizers = compressed_optimizers(self, trainer)
        self._watches = []
        for index, optimizer in enumerate(optimizers):
            name = optimizer_name(index, len(optimizers), optimizer)
            watch = _Watch(name, f"/{index}" if len(optimizers) > 1 else "", optimizer)
            for metric in (*watch.metrics.values(), watch.agreement):
                metric.to(_collective_device(trainer))
            watch.counted = StepRecord(**{item: getattr(optimizer.ledger.total, item) for item in _SUMS})
            watch.counted_steps = optimizer.ledger.steps
            watch.handle = optimizer.register_step_post_hook(partial(self._after_step, watch))
            self._watches.append(watch)
        if self.progress_bar:
            self._add_to_bar(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Measures the agreement of the ranks' signs while ``.grad`` still holds the local gradients."""
        every = self.sign_agreement_every_n_steps
        for watch in self._watches if every is not None else ():
            stepping = optimizer is watch.optimizer or getattr(optimizer, "optimizer", None) is watch.optimizer
            # Before a dense step the gradients are averages already, the same on all ranks.
            if stepping and not watch.optimizer.next_step_is_dense and (watch.optimizer.steps + 1) % every == 0:
                parameters = [p for group in watch.optimizer.param_groups for p in group["params"]]
                watch.agreement.update(p.new_zeros(p.numel()) if p.grad is None else p.grad for p in parameters)
                watch.found["onebit/sign_agreement"] = float(watch.agreement.compute())
                watch.agreement.reset()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs, if Lightning logs at this step and an optimizer has stepped."""
        if not (trainer.is_last_batch or trainer._logger_connector.should_update_logs):
            return
        values: dict[str, float] = {}
        for watch in self._watches:
            if watch.fresh is not None:
                watch.count()
                found = self._values(watch, watch.fresh)
                values.update({name + watch.suffix: value for name, value in found.items()})
                if self.figure:
                    self._remember(watch, found, loss_of(outputs, trainer))
                watch.fresh = None
        if values:
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends with the table and the figure."""
        if self.summary and self._watches:
            for watch in self._watches:
                watch.count()
            rank_zero_info(below_bar(trainer, self._table()))
        if self.figure and self._watches:
            # trainer.log_dir is a collective: every rank asks for it.
            directory = trainer.log_dir or trainer.default_root_dir
            if trainer.is_global_zero:
                path = self.figure
                if not isinstance(path, str):
                    path = os.path.join(_run_directory(trainer, directory), FIGURE_NAME)
                self._draw(path)
                rank_zero_info(f"CompressionStats: figure saved as {path}")
        self._release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stops watching."""
        self._release()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stops watching."""
        self._release()

    # ---------------------------------------------------------------------------------------------------- each step

    def _after_step(self, watch: _Watch, optimizer: Any, args: Any, kwargs: Any) -> None:
        watch.fresh = optimizer.ledger.last

    def _values(self, watch: _Watch, record: StepRecord) -> dict[str, float]:
        total = watch.optimizer.ledger.total
        values: dict[str, float] = {
            "onebit/bytes_sent": record.bytes_sent,
            "onebit/dense_bytes": record.dense_bytes,
            "onebit/ratio": record.ratio,
            "onebit/collectives": record.collectives,
            "onebit/control_bytes": record.control_bytes,
            "onebit/communication_seconds": record.communication_seconds,
            "onebit/compression_seconds": record.compression_seconds,
            "onebit/dense_step": record.dense,
            "onebit/total_bytes_sent": total.bytes_sent,
            "onebit/total_dense_bytes": total.dense_bytes,
            "onebit/total_ratio": total.ratio,
            "onebit/total_communication_seconds": total.communication_seconds,
            "onebit/total_compression_seconds": total.compression_seconds,
            "onebit/skipped_steps": watch.optimizer.skipped_steps,
        }
        if total.bytes_intra:
            values["onebit/bytes_intra"] = record.bytes_intra
            values["onebit/bytes_inter"] = record.bytes_inter
        if self._residual_is_due(watch, record):
            watch.residual_at = watch.optimizer.steps
            values["onebit/residual_ratio"] = watch.optimizer.residual_ratio()
            watch.residual.update(values["onebit/residual_ratio"])
        values.update(self._trust_ratios(watch))
        values.update(watch.found)
        watch.found.clear()
        # An infinite ratio (a step that sent nothing) would spoil every plot.
        return {name: float(value) for name, value in values.items() if math.isfinite(value)}

    def _trust_ratios(self, watch: _Watch) -> dict[str, float]:
        read = getattr(watch.optimizer, "get_lamb_coeffs", None)
        ratios: dict[str, float] = read() if read is not None else {}
        if not ratios:
            return {}
        mean = sum(ratios.values()) / len(ratios)
        summary = {"min": min(ratios.values()), "mean": mean, "max": max(ratios.values())}
        values = {f"onebit/trust_ratio_{kind}": value for kind, value in summary.items()}
        if self.trust_ratios_per_layer:
            values.update({f"onebit/trust_ratio/{name}": value for name, value in ratios.items()})
        return values

    def _residual_is_due(self, watch: _Watch, record: StepRecord) -> bool:
        if self.residual_every_n_steps is None or record.dense:
            return False
        return watch.residual_at is None or watch.optimizer.steps - watch.residual_at >= self.residual_every_n_steps

    def _release(self) -> None:
        for watch in self._watches:
            if watch.handle is not None:
                watch.handle.remove()
                watch.handle = None
        if self._restore_bar is not None:
            self._restore_bar()
            self._restore_bar = None

    # ------------------------------------------------------------------------------------------------ progress bar

    def _add_to_bar(self, trainer: Any) -> None:
        bar = trainer.progress_bar_callback
        if bar is None:
            return
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
        self._restore_bar = restore

    def _bar_item(self) -> str:
        totals = [watch.optimizer.ledger.total for watch in self._watches]
        both = StepRecord(
            bytes_sent=sum(total.bytes_sent for total in totals), dense_bytes=sum(total.dense_bytes for total in totals)
        )
        return f"{format_bytes(both.bytes_sent)} {format_ratio(both.ratio)}"

    # -------------------------------------------------------------------------------------------------- end of fit

    def _table(self) -> str:
        columns = [
            (
                "",
                "dense steps",
                "compressed steps",
                "skipped steps",
                "sent",
                "dense all-reduce",
                "ratio",
                "waiting",
                "kernels",
            )
        ]
        notes = []
        for watch in self._watches:
            ledger, total = watch.optimizer.ledger, watch.optimizer.ledger.total
            columns.append(
                (
                    watch.name,
                    f"{ledger.dense_steps:,}",
                    f"{ledger.compressed_steps:,}",
                    f"{watch.optimizer.skipped_steps:,}",
                    format_bytes(total.bytes_sent),
                    format_bytes(total.dense_bytes),
                    format_ratio(total.ratio),
                    f"{total.communication_seconds:.1f} s",
                    f"{total.compression_seconds:.1f} s",
                )
            )
            # compute() combines the ranks, so every rank must come here.
            note = f"{watch.name}: all ranks together sent {format_bytes(int(watch.volume.compute()))} in this fit"
            note += f", {format_ratio(float(watch.ratio.compute()))}"
            note += f"; waiting per step {1000 * float(watch.time.compute()):.3g} ms"
            if watch.residual.update_called:
                note += f"; residual norm / momentum norm {float(watch.residual.compute()):.3g}"
            notes.append(note + ".")
        lines = ["Compression since the start of training (bytes of one rank):"]
        for first in range(1, len(columns), OPTIMIZERS_ABREAST):
            part = [columns[0], *columns[first : first + OPTIMIZERS_ABREAST]]
            widths = [max(map(len, column)) for column in part]
            rows = [
                "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in zip(*part, strict=True)
            ]
            lines += [rows[0], "-" * len(rows[0]), *rows[1:]]
        return "\n".join([*lines, *notes])

    def _remember(self, watch: _Watch, values: Mapping[str, float], loss: torch.Tensor | None) -> None:
        nan = math.nan
        watch.history.append(
            (
                watch.optimizer.steps,
                values["onebit/total_bytes_sent"],
                values["onebit/total_dense_bytes"],
                values.get("onebit/ratio", nan),
                values.get("onebit/residual_ratio", nan),
                nan if loss is None else float(loss),
            )
        )
        if len(watch.history) > MAX_HISTORY:
            del watch.history[1::2]

    def _draw(self, path: str) -> None:
        figure = _figure_class()(figsize=(10, 7), layout="constrained")
        volume, ratio, residual, loss = figure.subplots(2, 2).flat
        for watch in self._watches:
            if not watch.history:
                continue
            steps, sent, dense, ratios, residuals, losses = zip(*watch.history, strict=True)
            volume.plot(steps, sent, label=f"{watch.name}, sent")
            volume.plot(steps, dense, linestyle="--", label=f"{watch.name}, dense all-reduce")
            ratio.plot(steps, ratios, label=watch.name)
            known = [(step, value) for step, value in zip(steps, residuals, strict=True) if not math.isnan(value)]
            residual.plot(*zip(*known, strict=True), label=watch.name) if known else None
            loss.plot(sent, losses, label=watch.name)
        titles = {
            volume: ("step", "bytes sent by one rank", "linear"),
            ratio: ("step", "ratio to dense all-reduce", "log"),
            residual: ("step", "residual norm / momentum norm", "linear"),
            loss: ("bytes sent by one rank", "training loss", "linear"),
        }
        for axis, (x, y, scale) in titles.items():
            axis.set_xlabel(x)
            axis.set_ylabel(y)
            axis.set_yscale(scale)
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=8)
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        figure.savefig(path, dpi=150)


def _run_directory(trainer: Any, directory: str) -> str:
    """A folder of this run alone: some loggers have only one for all runs, where figures would replace each other."""
    logger = next(iter(trainer.loggers), None)
    if logger is None or logger.save_dir is None or os.path.abspath(logger.save_dir) != os.path.abspath(directory):
        return directory
    return os.path.join(directory, str(logger.name or ""), str(logger.version or ""))


def _collective_device(trainer: Any) -> torch.device:
    """Where a tensor must be for the collectives of the default process group: NCCL knows only CUDA tensors."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        device: torch.device = trainer.strategy.root_device
        return device
    return torch.device("cpu")


def _figure_class() -> Any:
    # A Figure of its own, not pyplot's: no window, no global state, any thread.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "CompressionStats(figure=...) draws with matplotlib, which is not installed: install `lightning-onebit[plot]` "
            "or leave `figure` out."
        ) from error
    return Figure
