"""``overlap="backward"``: a bucket leaves as soon as the last of its gradients has landed, in bucket order."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_onebit.comm import Bucket, ExchangeSession
from lightning_onebit.comm.reducer import remove_with
from lightning_onebit.engine.codec import OneBit
from lightning_onebit.engine.step import Step


class Early:
    """The exchange that a backward has begun, and the hooks that hear of gradients."""

    def __init__(self) -> None:
        self._codec: OneBit | None = None
        self._session: ExchangeSession | None = None
        self._remove: Callable[[], object] | None = None
        self._hooked: set[int] = set()  # parameters whose gradients are heard of
        self._reset()

    def _reset(self) -> None:
        self._buckets: list[Bucket] = []
        self._awaited: list[int] = []  # by bucket, gradients that have not landed
        self._landed: set[int] = set()
        self._launched = 0

    @property
    def open(self) -> bool:
        """Whether an exchange is armed or under way."""
        return self._session is not None

    @property
    def sending(self) -> bool:
        """Whether backward has begun an exchange that the next step ends."""
        return self._session is not None and self._launched > 0

    def forget(self) -> None:
        """Lets go of an exchange that is over, or cannot be ended."""
        self._session = self._codec = None

    def disarm(self) -> None:
        """Lets go of an exchange of which nothing has left: it was armed for an earlier backward, of another model."""
        if not self.sending:
            self.forget()

    def remove_hooks(self) -> None:
        """Hears of no gradients any more; they know parameters by their slots."""
        if self._remove is not None:
            self._remove()
        self._remove, self._hooked = None, set()

    def arm(self, step: Step) -> None:
        """Opens the exchange of a step.

        Raises:
            RuntimeError: that of an earlier backward has not been ended.
        """
        kept = step.kept
        if self.sending:
            raise RuntimeError(
                f"step {kept.steps + 1}: overlap='backward' has sent the gradients of an earlier backward, and no step() came between. "
                "Of several models, say whose loss it is: toggle its optimizer under manual optimization, with Fabric call "
                "fabric.backward(loss, model=model). Add up the losses of one step, or let all backwards but the last only accumulate "
                "(toggle_model(sync_grad=False), fabric.no_backward_sync(model)); or use overlap='step'"
            )
        params, slots = kept.layout.params, kept.layout.slots
        trains = [params[i].requires_grad and i not in kept.late for i in slots]
        hooked = {slot for slot, trained in enumerate(trains) if trained}
        if not hooked <= self._hooked:  # some were frozen when the others were given theirs
            self.remove_hooks()
            hooks = [
                params[slots[slot]].register_post_accumulate_grad_hook(self._hook(slot)) for slot in sorted(hooked)
            ]
            self._remove, self._hooked = remove_with(self, hooks), hooked
        self._reset()
        self._buckets = [b for b in kept.layout.buckets if any(trains[slot] for slot in b.params)]
        self._awaited = [sum(trains[slot] for slot in b.params) for b in self._buckets]
        step.active = [p.requires_grad and i not in kept.late for i, p in enumerate(params)]
        step.grad_scale = 1.0
        step.forget_numbers()
        codec = step.rule.codec(step)
        assert isinstance(codec, OneBit) and step.link.exchange is not None
        # frozen for a while, beside others: they stay as they are; so do those that may turn out to be late
        codec.protect(self._buckets, [trained and i not in kept.cold for i, trained in zip(slots, trains, strict=True)])
        # results are used after backward: waiting for them would hold it up
        self._codec, self._session = codec, step.link.exchange.begin(codec, slack=len(self._buckets))

    def _hook(self, slot: int) -> Callable[[Tensor], None]:
        early = weakref.ref(self)  # as in the reducer's hooks

        def landed(_: Tensor) -> None:
            if (held := early()) is not None:
                held._gradient_landed(slot)

        return landed

    @torch.no_grad()
    def _gradient_landed(self, slot: int) -> None:
        if self._session is None or self._codec is None:
            return
        kept = self._codec.kept
        index = kept.layout.slots[slot]
        if index in kept.late:
            return
        if any(slot in bucket.params for bucket in self._buckets[: self._launched]):
            raise RuntimeError(
                f"{kept.name_of(index)} received a gradient after its bucket was sent (re-entrant activation "
                "checkpointing does that, or a second backward); use use_reentrant=False, or overlap='step'"
            )
        if slot in self._landed:
            return
        self._landed.add(slot)
        for position, bucket in enumerate(self._buckets):
            if slot in bucket.params:
                self._awaited[position] -= 1
        while self._launched < len(self._awaited) and self._awaited[self._launched] <= 0:
            position, self._launched = self._launched, self._launched + 1
            self._launch(self._buckets[position])

    def _launch(self, bucket: Bucket) -> None:
        """Sends a bucket; from here on all ranks have to end the exchange, whether or not the step is made."""
        assert self._session is not None
        try:
            self._session.launch(bucket)
        except BaseException:
            self.forget()  # nothing has been written, and nobody can end it
            raise

    def launch_rest(self) -> None:
        """Sends the buckets of which gradients have not landed; those count as zeros."""
        if self._session is not None:
            rest, self._launched = self._buckets[self._launched :], len(self._buckets)
            for bucket in rest:
                self._launch(bucket)

    def complete(self, step: Step) -> OneBit:
        """Brings all buckets in, of a backward that was not announced too; what has come back is not applied yet."""
        if self._session is None:
            self.arm(step)
        self.launch_rest()
        assert self._session is not None and self._codec is not None
        session, codec = self._session, self._codec
        self.forget()
        session.finish()
        return codec

    def abandon(self) -> None:
        """Brings in what backward has sent, on all ranks alike, and forgets it."""
        if self._session is not None:
            self.launch_rest()
            self._session.finish()  # what has arrived is not used, on any rank
        self.forget()
        self._reset()
        self.remove_hooks()
