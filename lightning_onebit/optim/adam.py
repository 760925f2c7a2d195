"""1-bit Adam."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_onebit.comm import Bucket, Plan
from lightning_onebit.kernels import Packed
from lightning_onebit.kernels.transfer import Download
from lightning_onebit.optim.arena import Phase
from lightning_onebit.optim.moments import AdamMoments
from lightning_onebit.optim.options import CommonOptions, check_choice, check_integer
from lightning_onebit.optim.policies import ShrinkPolicy

log = logging.getLogger("lightning_onebit")

#: dense steps of a refresh where nothing else is said
REFRESH_STEPS = 4


class OnebitAdam(AdamMoments):
    r"""1-bit Adam: Adam with a frozen second moment and one-bit, error-compensated momentum.

    For ``t <= freeze_step`` (warm-up) gradients are averaged densely and the step is that of ``torch.optim.AdamW``.
    Afterwards::

        m = exchange(b1 m + (1-b1) g_i)                        # the averaged, compressed momentum becomes m
        x -= lr*wd*x + lr * mhat / (sqrt(vhat_freeze) + eps)

    With ``preconditioned=True`` it is the step, not the momentum, that is compressed: with ``D = sqrt(vhat_freeze) + eps``::

        u = exchange(b1 u + (1-b1) g_i / D) ; x -= lr*wd*x + lr * uhat        # u = m/D

    Source: "1-bit Adam", arXiv 2102.02888, algorithm 1; this library's differences are listed in docs/differences.

    ``.grad`` holds the local gradient; ``step()`` does all communication it owes. Do not wrap the module in
    DistributedDataParallel. Weight decay is decoupled, as in AdamW. Parameters may be fp32, bf16 or fp16 (fp32 master
    weights are kept for the latter two); all state is fp32.

    Args:
        params: parameters or parameter groups. A group may set ``lr``, ``betas``, ``eps``, ``weight_decay`` and
            ``compress=False`` (always averaged densely; its second moments keep learning).
        lr: learning rate, >= 0.
        betas: decay of the first and second moment, each in ``[0, 1)``.
        eps: added to the denominator, >= 0.
        weight_decay: decoupled weight decay, >= 0.
        freeze_step: number of dense steps, >= 1; None: the switch is made by ``freeze()`` (``callbacks.VarianceFreeze``
            does it).
            The published hand rule is 15-25 % of all steps.
        bias_correction: True means what torch's AdamW means; False gives the published recipe.
        block_size: elements that share one scale, a multiple of 32.
        max_grad_norm: clips the global norm (of the averaged gradient in dense steps, ``sqrt((1/n) sum_i ||g_i||^2)``
            in compressed ones).
        preconditioned: compress the momentum divided by its denominators, so that every coordinate gets compression noise in
            proportion to the step it would take; False: the momentum itself, as published.
        refresh_interval: compressed steps between two refreshes of the frozen second moments, >= 1; ``"auto"``: refreshed whenever
            steps have become a tenth smaller, which they do where gradients go on shrinking after the freeze;
            ``"never"``: they stay as they froze, as published (docs/freeze). A refresh holds 8 bytes per parameter more while it lasts.
        refresh_steps: dense steps of a refresh, >= 1 (None: 4); between them they count for all steps since the last one.
        denominator_floor: ``phi``; denominators of coordinates with (almost) no gradient are at least phi times their
            tensor's mean.
        process_group: ranks that train together; None: the default group.
        force_compression: compress even in a world of one rank.
        bucket_mb: about how many MB of fp32 gradients one bucket carries.
        max_consecutive_skips: steps in a row that may be skipped because of non-finite gradients before an error. 0: the
            first is an error; 1-bit Adam and 1-bit LAMB then find it by what the exchange brings instead of looking
            at all gradients first, which takes a tenth and more off the work of a compressed step.
        kernels: ``"auto"``, ``"reference"``, ``"cpu"`` or ``"cuda"``; all give the same bits.
        timeout: seconds that a rank waits for the others in one collective.
        overlap: ``"step"``, or ``"backward"`` to send buckets as their gradients land (no norm clipping, no skipping of
            steps).
        residual_dtype: ``"float32"`` or ``"bfloat16"`` (half the memory of the residuals, some accuracy).

    Raises:
        TypeError: an option or parameter of the wrong type (sparse and complex parameters among them).
        ValueError: an option out of range; the message names it, its value and the range.

    Example:
        >>> optimizer = OnebitAdam(model.parameters(), lr=1e-3, weight_decay=0.01, freeze_step=1000)
        >>> loss(model(x)).backward()
        >>> optimizer.step()
    """

    algorithm = "onebit_adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | None = None,
        bias_correction: bool = True,
        block_size: int = 2048,
        max_grad_norm: float | None = None,
        denominator_floor: float = 0.1,
        preconditioned: bool = True,
        refresh_interval: int | str = "auto",
        refresh_steps: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        force_compression: bool = False,
        bucket_mb: float = 16.0,
        max_consecutive_skips: int = 100,
        kernels: str = "auto",
        timeout: float = 1800.0,
        overlap: str = "step",
        residual_dtype: str = "float32",
    ) -> None:
        if isinstance(refresh_interval, str):
            check_choice("refresh_interval", refresh_interval, ("auto", "never"))
        else:
            check_integer("refresh_interval", refresh_interval, least=1)
        check_integer("refresh_steps", refresh_steps, least=1, optional=True)
        if refresh_steps is not None and refresh_interval == "never":
            raise ValueError(
                f"refresh_steps={refresh_steps} has no effect with refresh_interval='never'; leave one of them out"
            )
        # steps since the freeze or the last refresh, and the parameters that have had a gradient in the refresh under way
        self._unrefreshed = 0
        self._learned: set[int] = set()
        # "auto": what says when, the energy of the last compressed step, which counts at the end of the next (a device need not be
        # waited for then), and after how many compressed steps the refresh that is due or under way has begun
        self._shrinking = ShrinkPolicy()
        self._energy: Download | None = None
        self._begun_after: int | None = None
        self._lengths: tuple[Plan, Tensor] | None = None  # of all blocks of a plan, fp64
        # by bucket: the momentum before a refresh that is one step long
        self._momentum_before: list[Tensor | Packed] = []
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            CommonOptions(
                block_size=block_size,
                max_grad_norm=max_grad_norm,
                process_group=process_group,
                force_compression=force_compression,
                bucket_mb=bucket_mb,
                max_consecutive_skips=max_consecutive_skips,
                kernels=kernels,
                timeout=timeout,
                overlap=overlap,
                residual_dtype=residual_dtype,
            ),
            {
                "freeze_step": freeze_step,
                "bias_correction": bias_correction,
                "denominator_floor": denominator_floor,
                "preconditioned": preconditioned,
                "refresh_interval": refresh_interval,
                "refresh_steps": (refresh_steps or REFRESH_STEPS) if refresh_interval != "never" else None,
            },
        )

    def _apply(self, bucket: Bucket, packed: Packed) -> None:
        decay = self._by_block("decay", bucket, self._decay, alike=True)
        alpha = self._by_block("alpha", bucket, lambda i: self._group(i)["lr"] / self._first_correction(i), alike=True)
        r = None if self._preconditioned else bucket.slice(self._flat["r"])
        self._kernels.apply_adam(bucket, self._bind_weights(bucket), packed, r, decay, alpha)

    @property
    def refreshed_share(self) -> float:
        """See the base: ``refresh_steps`` of ``refresh_interval + refresh_steps``; 0 for ``"auto"``, whose share nobody knows before."""
        interval, steps = self.settings["refresh_interval"], self.settings["refresh_steps"]
        return 0.0 if isinstance(interval, str) else steps / (interval + steps)

    # ----- refreshes --------------------------------------------------------------------------------------------------

    def _wants_dense(self) -> bool:
        return super()._wants_dense() or self._refresh_due()

    def _may_be_dense(self) -> bool:
        return super()._may_be_dense() or self.settings["refresh_interval"] != "never"

    @property
    def _interval(self) -> int | None:
        """Compressed steps before the next refresh or the one under way; None: there is none in sight."""
        chosen = self.settings["refresh_interval"]
        return self._begun_after if isinstance(chosen, str) else chosen

    def _refresh_due(self) -> bool:
        interval = self._interval
        return self._phase is Phase.COMPRESSED and interval is not None and self._unrefreshed >= interval

    def _step_dense(self, active: list[int]) -> None:
        refreshes = self.compresses and self._refresh_due()
        if refreshes:
            # begins even where no parameter has a gradient in its first step: the count of its steps has begun
            self._refresh([i for i in active if i in self._slot_of])
        super()._step_dense([i for i in active if not refreshes or i not in self._slot_of])

    def _refresh(self, members: list[int]) -> None:
        """A dense step of a refresh: momenta meet, second moments learn, and weights move by the denominators there are."""
        if "v" not in self._flat:
            if self.settings["refresh_steps"] == 1:
                self._momentum_before = self._momentum
            self._hold_momentum_flat()
            r = self._flat["r"]
            self._flat["v"] = self._second_moments(r, torch.zeros_like(r), aged=False)
        interval = self._interval
        assert interval is not None
        updates = 1 + interval // self.settings["refresh_steps"]
        for i in members:
            self._learn(i, updates)
            self._move(i)
        self._learned.update(members)
        self._publish(members)
        self._count(members)

    def _advance(self) -> None:
        compressed = self._phase is Phase.COMPRESSED and self.compresses
        super()._advance()
        if not compressed or self.settings["refresh_interval"] == "never":
            return
        self._unrefreshed += 1
        interval = self._interval
        if interval is None:
            self._watch()
        elif self._unrefreshed >= interval + self.settings["refresh_steps"]:
            learned = self._learned
            self._invert_refreshed()
            self._hold_momentum_by_bucket()
            self._restore_momentum(learned)

    def _watch(self) -> None:
        """Takes note of how large the last steps were, on all ranks alike, and lets a refresh begin when they have shrunk."""
        buckets = self._buckets()
        if not buckets:  # no parameter has an element
            return
        # summed in fp64 and rounded, so that the order of summation does not matter
        before, self._energy = self._energy, Download(self._exchanged_energy(buckets).float())
        if before is not None:
            self._shrinking.record(before.read())
        if self._shrinking.due:
            self._begun_after = self._unrefreshed
            log.info(
                "step %d: steps are down to %.0f %% of what they were after the second moments had frozen or been refreshed, %d steps "
                "ago; %d dense ones refresh them",
                *(self._steps, 100 * (self._shrinking.average / self._shrinking.highest) ** 0.5),
                *(self._unrefreshed, self.settings["refresh_steps"]),
            )

    def _exchanged_energy(self, buckets: Sequence[Bucket]) -> Tensor:
        """Sum of squares of the momentum as it travels, fp64 0-d; of all buckets at once where they are packed, as they mostly are."""
        held = [self._held_momentum(bucket) for bucket in buckets]
        scales = [momentum.scales.flatten() for momentum in held if isinstance(momentum, Packed)]
        if len(scales) < len(held):
            return torch.stack([self._momentum_energy(bucket).sum() for bucket in buckets]).sum()
        plan = self._known_plan()
        if self._lengths is None or self._lengths[0] is not plan:
            self._lengths = plan, torch.cat([bucket.lengths for bucket in buckets]).double()
        return torch.cat(scales).double().square_().dot(self._lengths[1])

    def _restore_momentum(self, learned: set[int]) -> None:
        """Gives who had no gradient in a refresh of one step its momentum back, which its change of form and back has rounded."""
        before, self._momentum_before = self._momentum_before, []
        idle = torch.tensor([i not in learned for i in self._slots], device=self._device)
        for bucket, held in zip(self._buckets(), before, strict=False):
            mask = idle[bucket.block_param]
            now = self._momentum[bucket.index]
            if isinstance(now, Tensor) and bool(mask.any()):
                whole = torch.empty_like(now)
                if isinstance(held, Packed):
                    self._kernels.unpack(held, bucket.lengths, whole)
                else:
                    whole.copy_(held)
                now.view(-1, bucket.block_size)[mask] = whole.view(-1, bucket.block_size)[mask]

    def _invert_refreshed(self) -> None:
        """Ends a refresh: denominators of the second moments as they are now. Residuals stay: they are owed as before."""
        if self._refreshing:
            v = self._flat.pop("v")
            for i in self._learned:
                self._invert_slot(self._slot_of[i], v, self._flat["r"])
        self._unrefreshed, self._learned = 0, set()
        self._shrinking, self._energy, self._begun_after = ShrinkPolicy(), None, None

    def _leave_compressed(self) -> None:
        self._invert_refreshed()
        super()._leave_compressed()

    def _books(self) -> dict[str, Any]:
        books = super()._books()
        if self.settings["refresh_interval"] != "never":
            books |= {
                "unrefreshed": self._unrefreshed,
                "refreshing": self._refreshing,
                "learned": sorted(self._learned),
            }
        if self.settings["refresh_interval"] == "auto":
            books["shrinking"] = {
                **self._shrinking.state_dict(),
                "energy": None if self._energy is None else self._energy.read(),
                "begun_after": self._begun_after,
            }
        return books

    @property
    def _refreshing(self) -> bool:
        """Whether a refresh has begun and not ended."""
        return "v" in self._flat and "r" in self._flat

    def _load_phase(self, phase: Phase, books: dict[str, Any], saved: dict[int, dict[str, Tensor]]) -> None:
        chosen = self.settings["refresh_interval"]
        refreshing = chosen != "never" and bool(books.get("refreshing", False))
        self._learned = set(books["learned"]) if refreshing else set()
        self._unrefreshed = 0 if chosen == "never" else books.get("unrefreshed", 0)
        self._shrinking, self._energy, self._begun_after = ShrinkPolicy(), None, None
        if chosen == "auto":
            self._load_shrinking(books.get("shrinking"), refreshing)
        elif chosen != "never":
            # the interval may be another now: a refresh that has begun is finished, one that is overdue begins
            bound = max if refreshing else min
            self._unrefreshed = bound(self._unrefreshed, chosen + refreshing)
        super()._load_phase(phase, books, saved)
        if not refreshing or "r" not in self._flat:
            return
        for name, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
            self._flat[name] = torch.zeros_like(self._flat["r"])
            self._load_arena(self._flat[name], key, saved)
        self._momentum = []

    def _load_shrinking(self, saved: dict[str, Any] | None, refreshing: bool) -> None:
        """Goes on watching; a refresh of another interval, of which at least one step has been made, is finished."""
        if saved is None:
            self._begun_after = self._unrefreshed - 1 if refreshing else None
            return
        self._shrinking.load_state_dict(saved)
        self._begun_after = saved["begun_after"]
        if saved["energy"] is not None:
            self._energy = Download(torch.tensor(saved["energy"], dtype=torch.float64))
