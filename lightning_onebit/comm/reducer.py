"""Dense gradient averaging, overlapped with backward: what DistributedDataParallel does, without wrapping a module."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_onebit.comm.transport import CollectiveFailure, Pending, Transport
from lightning_onebit.kernels.common import is_dense

log = logging.getLogger("lightning_onebit")


def remove_with(owner: object, handles: Sequence[RemovableHandle]) -> Callable[[], object]:
    """Removes hooks that hold their owner weakly when it is gone: parameters that outlive it would collect them.

    Returns:
        A function that removes them at once.
    """

    def remove(handles: Sequence[RemovableHandle]) -> None:
        for handle in handles:
            handle.remove()

    finalizer = weakref.finalize(owner, remove, handles)
    finalizer.atexit = False
    return finalizer


class _DenseBucket:
    """A flat buffer for some parameters' gradients, with one presence slot per parameter at its end (those without elements too)."""

    def __init__(self, params: Sequence[torch.nn.Parameter], indices: Sequence[int]) -> None:
        self.indices = tuple(indices)
        self._params = [params[i] for i in indices]
        self.dtype, self.device = self._params[0].dtype, self._params[0].device
        self._numel = sum(p.numel() for p in self._params)
        self.flat: Tensor | None = None
        self.views: list[Tensor] = []
        self.pending: Pending | None = None
        # whether this rank has a gradient, as it was when it was filled in
        self.here = [False] * len(indices)
        # (version of the buffer, verdict) of the last look for values that are not finite
        self._looked: tuple[int, Tensor] | None = None
        self.missing = len(indices)

    def allocate(self) -> None:
        if self.flat is not None:
            return
        self.flat = torch.zeros(self._numel + len(self.indices), dtype=self.dtype, device=self.device)
        self.views, start = [], 0
        for p in self._params:
            # the parameter's own strides, so that the view can stand as its .grad; one with gaps would reach into its neighbour
            place = self.flat[start : start + p.numel()]
            self.views.append(place.as_strided(p.shape, p.stride()) if is_dense(p) else place.view(p.shape))
            start += p.numel()

    def release(self) -> None:
        self.flat, self.views, self._looked = None, [], None

    def finite(self) -> Tensor:
        """Whether all values are finite, bool, 0-d; looked at once, and again only if something has written to them since."""
        assert self.flat is not None
        if self._looked is None or self._looked[0] != self.flat._version:
            # one read at memory speed; a sum that overflows although every value is finite is looked at again, exactly
            flat = torch.view_as_real(self.flat) if self.dtype.is_complex else self.flat
            wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
            total = torch.isfinite(flat.sum(dtype=wide))
            if self.device.type == "cpu" and not total:
                total = torch.isfinite(flat).all()
            elif self.device.type != "cpu":
                total = torch.isfinite(torch.linalg.vector_norm(flat, float("inf"), dtype=wide))
            self._looked = self.flat._version, total
        return self._looked[1]

    @property
    def slots(self) -> Tensor:
        """Presence slots: after the sum over ranks, positive where any rank has a gradient."""
        assert self.flat is not None
        return self.flat[self._numel :]


class Reducer:
    """Averages gradients over the ranks of a transport, bucket by bucket, as they arrive.

    Each gradient is multiplied by ``1/n`` into a flat bucket (as DDP does) and the bucket is summed over the ranks as
    soon as its last gradient has landed and all earlier buckets have been launched; what never lands is launched by
    ``finish()`` as zeros, so there is no ``find_unused_parameters`` to set. Afterwards ``.grad`` is a view of the
    bucket: no copy back. A parameter without a gradient on all ranks keeps ``.grad is None``.

    Once a bucket is on its way and another gradient lands, ``.grad`` of its parameters is None until ``finish()``: backward makes its
    next gradients in the memory of those, so that the model's gradients are never there twice. Parameters with further
    post-accumulate hooks keep theirs.

    Args:
        params: parameters of any floating dtype; buckets follow their reverse order and never mix dtypes.
        transport: the ranks.
        bucket_bytes: about how large a bucket is.
        overlap: False launches everything in ``finish()`` (for models that run backward hooks of a parameter more than
            once,
            such as re-entrant activation checkpointing).
        lanes: a number per parameter; ``select()`` says which lanes take part. Buckets never mix lanes.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        transport: Transport,
        bucket_bytes: int,
        overlap: bool = True,
        lanes: Sequence[int] | None = None,
    ) -> None:
        self.params = list(params)
        self.transport = transport
        self.overlap = overlap
        self._lanes = list(lanes) if lanes is not None else [0] * len(self.params)
        self._all_buckets = self._plan(bucket_bytes)
        self._place = {i: (b, k) for b in self._all_buckets for k, i in enumerate(b.indices)}
        self._buckets = self._all_buckets
        self._selected = set(self._lanes)
        self._armed = False
        self._next = 0
        # buckets, in order, whose gradients have been given back
        self._given_back = 0
        # gradients that averages have replaced, kept until the next backward takes their memory: given back at once, an
        # allocator hands it to the system and every step pays for its pages anew
        self._spent: list[Tensor] = []
        # whether a gradient has arrived that the last finish() did not average
        self.stale = True
        self._ready = [False] * len(self.params)
        hooks = [
            p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(self.params) if p.requires_grad
        ]
        self._remove_hooks = remove_with(self, hooks)

    def _plan(self, bucket_bytes: int) -> list[_DenseBucket]:
        buckets: list[_DenseBucket] = []
        current: list[int] = []
        size = 0
        for i in reversed(range(len(self.params))):
            p = self.params[i]
            if p.numel() == 0:
                continue
            nbytes = p.numel() * p.element_size()
            mixed = current and self._kind(current[0]) != self._kind(i)
            if current and (mixed or size + nbytes > bucket_bytes):
                buckets.append(_DenseBucket(self.params, current))
                current, size = [], 0
            current.append(i)
            size += nbytes
        if current:
            buckets.append(_DenseBucket(self.params, current))
        return [
            _DenseBucket(self.params, [*b.indices, *self._elementless(b, buckets[k + 1 :])])
            for k, b in enumerate(buckets)
        ]

    def _elementless(self, bucket: _DenseBucket, later: Sequence[_DenseBucket]) -> list[int]:
        """Parameters without elements whose presence a bucket tells: those of its lane, if it is the last of that lane.

        Hooks do not count them, so that bucket leaves in ``finish()``, when it is known which ranks have their gradients.
        """
        lane = self._lanes[bucket.indices[0]]
        if any(self._lanes[b.indices[0]] == lane for b in later):
            return []
        return [i for i, p in enumerate(self.params) if p.numel() == 0 and self._lanes[i] == lane]

    def _kind(self, index: int) -> tuple[object, ...]:
        p = self.params[index]
        return p.dtype, p.device, self._lanes[index]

    def select(self, lanes: set[int]) -> None:
        """Restricts the following rounds to some lanes, alike on all ranks; the others' buffers are given up."""
        if lanes == self._selected:
            return
        self._drain()
        self._selected = set(lanes)
        self._buckets = [b for b in self._all_buckets if self._lanes[b.indices[0]] in lanes]
        for bucket in self._all_buckets:
            if bucket not in self._buckets:
                bucket.release()

    def takes_part(self, index: int) -> bool:
        """Whether a parameter's lane is selected."""
        return self._lanes[index] in self._selected

    @property
    def armed(self) -> bool:
        """Whether a backward has been announced whose gradients nobody has asked for yet; alike on all ranks."""
        return self._armed

    def arm(self) -> None:
        """Call before the backward whose gradients are to be averaged; forgotten launches of a broken step are drained."""
        self._drain()
        self._spent = []
        self._armed = True

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        # weakly: the garbage collector cannot see through hooks, and parameters that hold the reducer that holds them would live for ever
        reducer = weakref.ref(self)

        def hook(_: Tensor) -> None:
            if (held := reducer()) is not None:
                held._landed(index)

        return hook

    def _landed(self, index: int) -> None:
        self.stale, param = True, self.params[index]
        if not (self._armed and self.overlap and param.numel() and self.takes_part(index)):
            return
        if param.grad is not None and param.grad.layout is not torch.strided:
            return  # a sparse gradient: the optimizer refuses it by the parameter's name
        bucket, k = self._place[index]
        self._give_back()
        if self._ready[index]:
            in_place = param.grad is not None and param.grad.data_ptr() == bucket.views[k].data_ptr()
            if bucket.pending is not None or in_place:
                raise RuntimeError(
                    f"parameter {index} of shape {tuple(param.shape)} received a gradient twice in one backward, after its bucket "
                    "was sent (re-entrant activation checkpointing does that); use use_reentrant=False, or overlap_dense=False"
                )
            self._fill(index)  # not sent yet: take the newer, complete value
            return
        self._ready[index] = True
        self._fill(index)
        bucket.missing -= 1
        self._launch_ready()

    def _give_back(self) -> None:
        """Lets go of the gradients of buckets that are on their way, unless somebody else's hook waits for them too.

        Another optimizer of the same parameter, say, which sends its bucket when the last of its gradients has landed.
        """
        for bucket in self._buckets[self._given_back : self._next]:
            for i in bucket.indices:
                if len(getattr(self.params[i], "_post_accumulate_grad_hooks", None) or ()) <= 1:
                    self.params[i].grad = None
        self._given_back = self._next

    @torch.no_grad()
    def _fill(self, index: int) -> None:
        bucket, k = self._place[index]
        bucket.allocate()
        grad, view = self.params[index].grad, bucket.views[k]
        bucket.here[k] = grad is not None
        share = 1.0 / self.transport.size
        if grad is None:
            view.zero_()
            bucket.slots[k] = 0.0
            return
        if grad.data_ptr() == view.data_ptr():
            view.mul_(share)
        else:
            torch.mul(grad, share, out=view)
        bucket.slots[k] = share

    def _launch_ready(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            bucket = self._buckets[self._next]
            assert bucket.flat is not None
            bucket.pending = self.transport.all_reduce(bucket.flat, what=f"dense all-reduce of bucket {self._next}")
            self._next += 1

    @torch.no_grad()
    def finish(self) -> list[bool]:
        """Launches what is missing, waits for all, and makes ``.grad`` the average.

        Returns:
            Per parameter, whether any rank had a gradient (alike on all ranks; False in lanes that are not selected). One without
            elements has none if no parameter of its lane has any.
        """
        for bucket in self._buckets:
            for i in bucket.indices:
                if not self._ready[i]:
                    self._fill(i)
            bucket.missing = 0
        self._launch_ready()
        present = [False] * len(self.params)
        for bucket in self._buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.pending, bucket._looked = None, None
            bucket.finite()  # while the next one is on its way
            here = bucket.here
            # reading the slots synchronises with the device, so ask only about gradients that are missing here
            anywhere = here if all(here) else [s.real > 0 for s in bucket.slots.tolist()]
            for k, i in enumerate(bucket.indices):
                present[i] = here[k] or anywhere[k]
                if self.params[i].numel() == 0:
                    continue  # may have another dtype than its bucket
                # an allocator of a device keeps what is given back
                if self._armed and bucket.device.type == "cpu" and (old := self.params[i].grad) is not None:
                    self._spent.append(old)
                self.params[i].grad = bucket.views[k].detach() if present[i] else None
        self._reset()
        self.stale = False
        return present

    def finite(self) -> Tensor:
        """Whether all averages of the last ``finish()`` are finite: bool, 0-d, on the parameters' device."""
        verdicts = [bucket.finite() for bucket in self._buckets]
        return torch.stack([v.to(verdicts[0].device) for v in verdicts]).all() if verdicts else torch.tensor(True)

    def _reset(self) -> None:
        self._armed = False
        self._next = self._given_back = 0
        self._ready = [False] * len(self.params)
        for bucket in self._buckets:
            bucket.missing = len(bucket.indices)

    def _drain(self) -> None:
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None
        self._reset()

    def close(self) -> None:
        """Removes the hooks and gives the buffers up; gradients that are views of them stay valid."""
        try:
            self._drain()
        except CollectiveFailure as failure:  # nobody will look at what it would have brought
            log.warning("dense averages that nobody waits for any more: %s", failure)
        for bucket in self._all_buckets:
            bucket.pending = None
        self._reset()
        self._remove_hooks()
        self._spent = []
        for bucket in self._all_buckets:
            bucket.release()
