"""The collectives of every backend, written once: they check their arguments and launch a primitive.

[Note: bytes on the wire]
    ``bytes_sent`` counts payload by the usual formulas, whatever algorithm moves it; B is the size of the
    whole tensor (of `inp` for reduce_scatter, of `out` for all_gather), n the world size:
    all_reduce 2B(n-1)/n · reduce_scatter, all_gather, all_to_all, reduce, broadcast B(n-1)/n (for reduce and
    broadcast the mean over the ranks) · gather B on ranks other than root · scatter, all_to_all_v, send:
    what goes to other ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bagua_rt.backend import PreparedCall, ReduceOp, Stream, Work
from bagua_rt.backends import _arguments as arguments
from bagua_rt.backends._work import LaunchedAgain
from bagua_rt.errors import UsageError

Pairs = Sequence[tuple[int, torch.Tensor]]
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Collectives(ABC):
    """The collectives of `bagua_rt.backend.Communicator`, over the primitives of a backend.

    Attributes:
        backend_name: For error texts.
        reducible: The dtypes that each reduction takes.
        rank: This rank.
        world_size: Number of ranks.
    """

    backend_name: str
    reducible: Mapping[str, frozenset[torch.dtype]]
    rank: int
    world_size: int
    _device: torch.device
    _peers: int

    # ---- primitives: what a backend implements. `via` is whatever _queue puts in front of the arguments.

    @abstractmethod
    def _all_reduce(self, via: Any, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None: ...
    @abstractmethod
    def _reduce(self, via: Any, t: torch.Tensor, root: int, op: ReduceOp) -> None: ...
    @abstractmethod
    def _broadcast(self, via: Any, t: torch.Tensor, root: int) -> None: ...
    @abstractmethod
    def _all_gather(self, via: Any, out: torch.Tensor, inp: torch.Tensor) -> None: ...
    @abstractmethod
    def _reduce_scatter(self, via: Any, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None: ...
    @abstractmethod
    def _all_to_all(self, via: Any, out: torch.Tensor, inp: torch.Tensor) -> None: ...
    @abstractmethod
    def _exchange(self, via: Any, sends: Pairs, receives: Pairs, copies: Copies) -> None:
        """Start every send and receive, make the local copies (destination, source), wait for all."""

    @abstractmethod
    def _barrier(self, via: Any) -> None: ...
    @abstractmethod
    def _enter(self, stream: Stream | None) -> Stream:
        """The lane of a call, or the reason why there can be none."""

    @abstractmethod
    def _launch(
        self, lane: Stream, operation: str, primitive: Callable[..., None], args: tuple[Any, ...], sent: int
    ) -> Work:
        """Launch a checked operation, now or at the end of the open group; `sent` bytes go out."""

    # ---- collectives

    def all_reduce_(self, t: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None) -> Work:
        """Reduce `t` over the ranks, in place.

        Args:
            t: A contiguous tensor of the same shape on every rank.
            op: "sum", "avg" (scaled before the sum), "max", "min" or "prod".
            stream: The lane; None takes lane 0.

        Returns:
            The operation under way.

        Raises:
            UsageError: an argument can't be right; nothing was launched.
            CollectiveError: the communicator has failed.
            ClosedError: it was closed, or belongs to the process that forked this one.
        """
        lane = self._enter(stream)
        arguments.require_plain("all_reduce_", self._device, t=t)
        self._require_reducible("all_reduce_", t, op)
        return self._launch(lane, "all_reduce_", self._all_reduce, (t, t, op), self._share(t, 2))

    def prepare_all_reduce_(
        self, t: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None
    ) -> PreparedCall:
        """Check the arguments of an all_reduce_ that is to be launched again and again; launch nothing.

        Returns:
            The call, which all ranks launch in the same order among their other operations.

        Raises:
            UsageError: an argument can't be right.
            CollectiveError: the communicator has failed.
            ClosedError: it was closed, or belongs to the process that forked this one.
        """
        lane = self._enter(stream)
        arguments.require_plain("prepare_all_reduce_", self._device, t=t)
        self._require_reducible("prepare_all_reduce_", t, op)
        memory, sent = t.detach(), self._share(t, 2)  # the memory of now, whatever becomes of `t`

        def launch() -> Work:
            self._enter(lane)
            return self._launch(lane, "all_reduce_", self._all_reduce, (memory, memory, op), sent)

        return LaunchedAgain("all_reduce_", t, launch)

    def all_reduce(
        self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None
    ) -> Work:
        """Reduce `inp` over the ranks into `out`; `out` may be `inp` itself. Raises as `all_reduce_`."""
        lane = self._enter(stream)
        arguments.require_plain("all_reduce", self._device, out=out, inp=inp)
        self._require_reducible("all_reduce", inp, op)
        arguments.require_one_dtype("all_reduce", (out, inp))
        arguments.require_numel("all_reduce", "out", out, inp.numel(), "as many as inp")
        if out.data_ptr() != inp.data_ptr():
            arguments.require_apart("all_reduce", (out,), (inp,))
        return self._launch(lane, "all_reduce", self._all_reduce, (out, inp, op), self._share(inp, 2))

    def reduce_(
        self, t: torch.Tensor, root: int, op: ReduceOp = "avg", *, stream: Stream | None = None
    ) -> Work:
        """Reduce `t` over the ranks into root's `t`; the other ranks' `t` keeps its values. Raises as
        `all_reduce_`."""
        lane = self._enter(stream)
        arguments.require_plain("reduce_", self._device, t=t)
        self._require_reducible("reduce_", t, op)
        arguments.require_rank("reduce_", "root", root, self.world_size)
        return self._launch(lane, "reduce_", self._reduce, (t, root, op), self._share(t))

    def broadcast_(self, t: torch.Tensor, root: int = 0, *, stream: Stream | None = None) -> Work:
        """Make every rank's `t` equal to root's. Carries every dtype. Raises as `all_reduce_`."""
        lane = self._enter(stream)
        arguments.require_plain("broadcast_", self._device, t=t)
        arguments.require_rank("broadcast_", "root", root, self.world_size)
        return self._launch(lane, "broadcast_", self._broadcast, (t, root), self._share(t))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, *, stream: Stream | None = None) -> Work:
        """Gather every rank's `inp` into `out`, in the order of ranks. Carries every dtype.

        **Shapes:** ``out.numel() == world_size * inp.numel()``; `inp` may be exactly this rank's part of
        `out` (in place). Raises as `all_reduce_`.
        """
        lane = self._enter(stream)
        arguments.require_plain("all_gather", self._device, out=out, inp=inp)
        arguments.require_one_dtype("all_gather", (out, inp))
        arguments.require_numel("all_gather", "out", out, self.world_size * inp.numel(), "world_size * inp")
        if not self._is_own_part(inp, out):
            arguments.require_apart("all_gather", (out,), (inp,))
        return self._launch(lane, "all_gather", self._all_gather, (out, inp), self._share(out))

    def reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp = "avg", *, stream: Stream | None = None
    ) -> Work:
        """Reduce `inp` over the ranks and leave this rank's part of the result in `out`.

        **Shapes:** ``inp.numel() == world_size * out.numel()``; `out` may be exactly this rank's part of
        `inp` (in place); the rest of `inp` keeps its values. Raises as `all_reduce_`.
        """
        lane = self._enter(stream)
        arguments.require_plain("reduce_scatter", self._device, out=out, inp=inp)
        self._require_reducible("reduce_scatter", inp, op)
        arguments.require_one_dtype("reduce_scatter", (out, inp))
        arguments.require_numel(
            "reduce_scatter", "inp", inp, self.world_size * out.numel(), "world_size * out"
        )
        if not self._is_own_part(out, inp):
            arguments.require_apart("reduce_scatter", (out,), (inp,))
        return self._launch(lane, "reduce_scatter", self._reduce_scatter, (out, inp, op), self._share(inp))

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, *, stream: Stream | None = None) -> Work:
        """Send part k of `inp` to rank k, receive part k of `out` from rank k. Carries every dtype.

        **Shapes:** `inp` and `out` have the same number of elements, divisible by world_size. Raises as
        `all_reduce_`.
        """
        lane = self._enter(stream)
        arguments.require_plain("all_to_all", self._device, out=out, inp=inp)
        arguments.require_one_dtype("all_to_all", (out, inp))
        arguments.require_numel("all_to_all", "out", out, inp.numel(), "as many as inp")
        if inp.numel() % self.world_size:
            raise UsageError(
                "all_to_all: inp can't be divided evenly among the ranks",
                expected=f"a multiple of {self.world_size} elements",
                got=f"{inp.numel()} elements",
                fix="pad it, or use all_to_all_v",
            )
        arguments.require_apart("all_to_all", (out,), (inp,))
        return self._launch(lane, "all_to_all", self._all_to_all, (out, inp), self._share(inp))

    def all_to_all_v(
        self,
        outs: Sequence[torch.Tensor],
        inps: Sequence[torch.Tensor],
        *,
        stream: Stream | None = None,
    ) -> Work:
        """Send ``inps[k]`` to rank k, receive ``outs[k]`` from rank k. Carries every dtype.

        **Shapes:** ``outs[k]`` here has as many elements as ``inps[this rank]`` on rank k. Raises as
        `all_reduce_`.
        """
        lane, me = self._enter(stream), self.rank
        arguments.require_list("all_to_all_v", "outs", outs, self.world_size, self._device)
        arguments.require_list("all_to_all_v", "inps", inps, self.world_size, self._device)
        arguments.require_one_dtype("all_to_all_v", (*outs, *inps))
        arguments.require_numel("all_to_all_v", f"outs[{me}]", outs[me], inps[me].numel(), "its own input")
        arguments.require_apart("all_to_all_v", outs, inps)
        return self._launch_exchange(
            lane, "all_to_all_v", self._others(inps), self._others(outs), outs[me], inps[me]
        )

    def gather(
        self,
        outs: Sequence[torch.Tensor] | None,
        t: torch.Tensor,
        root: int = 0,
        *,
        stream: Stream | None = None,
    ) -> Work:
        """Gather every rank's `t` into root's list `outs` (None elsewhere). Carries every dtype. Raises as
        `all_reduce_`."""
        lane = self._enter(stream)
        arguments.require_plain("gather", self._device, t=t)
        arguments.require_rank("gather", "root", root, self.world_size)
        parts = self._root_list("gather", "outs", outs, t, root)
        if parts is None:
            return self._launch_exchange(lane, "gather", [(root, t)], [])
        arguments.require_apart("gather", parts, (t,))
        return self._launch_exchange(lane, "gather", [], self._others(parts), parts[root], t)

    def scatter(
        self,
        t: torch.Tensor,
        ins: Sequence[torch.Tensor] | None,
        root: int = 0,
        *,
        stream: Stream | None = None,
    ) -> Work:
        """Send ``ins[k]`` of root (None elsewhere) into rank k's `t`. Carries every dtype. Raises as
        `all_reduce_`."""
        lane = self._enter(stream)
        arguments.require_plain("scatter", self._device, t=t)
        arguments.require_rank("scatter", "root", root, self.world_size)
        parts = self._root_list("scatter", "ins", ins, t, root)
        if parts is None:
            return self._launch_exchange(lane, "scatter", [], [(root, t)])
        arguments.require_apart("scatter", (t,), parts)
        return self._launch_exchange(lane, "scatter", self._others(parts), [], t, parts[root])

    def send(self, t: torch.Tensor, peer: int, *, stream: Stream | None = None) -> Work:
        """Send `t` to `peer`, which receives it. Carries every dtype.

        Two ranks that both send first on one lane wait for each other until the deadline: use `send_recv`,
        or a `group`. Raises as `all_reduce_`.
        """
        lane = self._enter(stream)
        arguments.require_plain("send", self._device, t=t)
        arguments.require_rank("send", "peer", peer, self.world_size, self.rank)
        return self._launch_exchange(lane, "send", [(peer, t)], [])

    def recv(self, t: torch.Tensor, peer: int, *, stream: Stream | None = None) -> Work:
        """Receive `t` from `peer`; see `send`."""
        lane = self._enter(stream)
        arguments.require_plain("recv", self._device, t=t)
        arguments.require_rank("recv", "peer", peer, self.world_size, self.rank)
        return self._launch_exchange(lane, "recv", [], [(peer, t)])

    def send_recv(
        self,
        out_t: torch.Tensor,
        dst: int,
        in_t: torch.Tensor,
        src: int,
        *,
        stream: Stream | None = None,
    ) -> Work:
        """Send `out_t` to `dst` and receive `in_t` from `src` at once. Carries every dtype.

        `dst` and `src` may both be this rank: that is a copy. Raises as `all_reduce_`.
        """
        lane = self._enter(stream)
        arguments.require_plain("send_recv", self._device, out_t=out_t, in_t=in_t)
        own = None if dst == src else self.rank
        arguments.require_rank("send_recv", "dst", dst, self.world_size, own)
        arguments.require_rank("send_recv", "src", src, self.world_size, own)
        arguments.require_apart("send_recv", (in_t,), (out_t,))
        if dst != self.rank:
            return self._launch_exchange(lane, "send_recv", [(dst, out_t)], [(src, in_t)])
        arguments.require_one_dtype("send_recv", (out_t, in_t))
        arguments.require_numel("send_recv", "in_t", in_t, out_t.numel(), "as many as out_t")
        return self._launch_exchange(lane, "send_recv", [], [], in_t, out_t)

    def barrier(self) -> Work:
        """Complete, on lane 0, once every rank has reached it."""
        return self._launch(self._enter(None), "barrier", self._barrier, (), 0)

    def _launch_exchange(
        self,
        lane: Stream,
        operation: str,
        sends: Pairs,
        receives: Pairs,
        copy_to: torch.Tensor | None = None,
        copy_from: torch.Tensor | None = None,
    ) -> Work:
        copies = [] if copy_to is None or copy_from is None else [(copy_to, copy_from)]
        sent = sum(t.nbytes for _, t in sends)
        return self._launch(lane, operation, self._exchange, (sends, receives, copies), sent)

    def _others(self, tensors: Sequence[torch.Tensor]) -> Pairs:
        return [(rank, t) for rank, t in enumerate(tensors) if rank != self.rank]

    def _share(self, t: torch.Tensor, times: int = 1) -> int:
        """The bytes of `t` that aren't this rank's own part."""
        return times * t.nbytes * self._peers // self.world_size

    def _require_reducible(self, operation: str, t: torch.Tensor, op: Any) -> None:
        if type(op) is not str or t.dtype not in self.reducible.get(op, ()):
            arguments.refuse_reduction(operation, t, op, self.reducible, self.backend_name)

    def _is_own_part(self, part: torch.Tensor, whole: torch.Tensor) -> bool:
        """Is `part` exactly this rank's slice of `whole`?"""
        offset = self.rank * part.numel() * part.element_size()
        return part.data_ptr() == whole.data_ptr() + offset

    def _root_list(
        self, operation: str, argument: str, tensors: Any, t: torch.Tensor, root: int
    ) -> Sequence[torch.Tensor] | None:
        """Root's checked list; None on the other ranks, which must not give one."""
        if self.rank != root:
            if tensors is not None:
                raise UsageError(
                    f"{operation}: only root ({root}) gives {argument}", expected="None", got="a list"
                )
            return None
        parts = arguments.require_list(operation, argument, tensors, self.world_size, self._device)
        arguments.require_one_dtype(operation, (*parts, t))
        for index, part in enumerate(parts):
            arguments.require_numel(operation, f"{argument}[{index}]", part, t.numel(), "as many as t")
        return parts
