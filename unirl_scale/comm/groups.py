"""Process groups as values, and collectives that only move bytes.

No method here adds floating-point numbers: every tensor crosses the wire as uint8, so any backend carries any
dtype and is free to pick any algorithm, channel count or topology. Ordered sums are in `ordered.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from unirl_scale.comm.breaker import Breaker
from unirl_scale.comm.wire import Pending, Traffic, bytes_of, failures_as_comm_errors
from unirl_scale.core.errors import CommError, MeshError, ShapeError
from unirl_scale.core.progress import Progress

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Group", "GroupFactory", "Pending", "Traffic", "connect"]

# Torch 2.13 renames this collective and warns about the old name; 2.11 has only the old one.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Some ranks that exchange bytes. A group of one needs no backend: its collectives copy or do nothing.

    Every method is collective over the group unless it says otherwise, and raises CommError when the transfer
    fails or a member is gone. Autograd does not see these methods.

    Attributes:
        ranks: global ranks of the members, ascending.
        index: this rank's position in `ranks`.
        handle: torch process group; None when there is one member.
        device: where the backend reads and writes; a tensor that lives elsewhere is staged through it.
        traffic: counts the payload.
        progress: is told of every transfer while this rank waits in it.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None = None
    device: torch.device = _CPU
    traffic: Traffic = field(default_factory=Traffic)
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def single(cls, rank: int = 0, device: torch.device | str = "cpu") -> Group:
        """A group of this rank alone, whose tensors live on `device`."""
        return cls(ranks=(rank,), index=0, device=torch.device(device))

    @contextmanager
    def transferring(self, kind: str) -> Iterator[None]:
        """Around a call of the backend: tells `progress`, and turns its failure into a CommError."""
        with failures_as_comm_errors(kind, self.ranks), self.progress.communicating(kind, self.ranks):
            yield

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    # ---- gather and exchange ----------------------------------------------------------------------
    def all_gather(self, t: Tensor) -> Tensor:
        """Every member's `t` (same shape and dtype everywhere), [size, *t.shape], in member order."""
        if self.size == 1:
            return t.detach().clone().unsqueeze(0)
        source = self._outgoing(t)
        gathered = torch.empty(self.size * source.numel(), dtype=torch.uint8, device=self.device)
        if source.numel():
            with self.transferring("all_gather"):
                _all_gather_flat(gathered, source, group=self.handle)
        others_bytes = source.numel() * (self.size - 1)
        self.traffic.add("all_gather", others_bytes, others_bytes)
        return gathered.view(t.dtype).to(t.device).view(self.size, *t.shape)

    def all_gather_uneven(self, t: Tensor, sizes: Sequence[int]) -> Tensor:
        """Concatenate flat tensors of different lengths.

        Args:
            t: [sizes[index]], any dtype.
            sizes: element count of each member, equal on all members.

        Returns:
            [sum(sizes)]. Shorter members are padded on the wire to the longest.

        Raises:
            ShapeError: `t` has not sizes[index] elements, or not one size a member.
        """
        self._check_sizes("all_gather_uneven", sizes)
        _check_elements("all_gather_uneven", t, sizes[self.index])
        longest, flat = max(sizes), t.detach().reshape(-1)
        if flat.numel() < longest:
            flat = torch.cat([flat, flat.new_zeros(longest - flat.numel())])
        rows = self.all_gather(flat)
        if min(sizes) == longest:
            return rows.view(-1)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    def all_to_all(self, t: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        """`start_all_to_all`, waited for."""
        return self.start_all_to_all(t, send_sizes, recv_sizes).wait()

    def start_all_to_all(self, t: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Pending:
        """Send consecutive pieces of a flat tensor, one to each member.

        Args:
            t: [sum(send_sizes)], any dtype; leave it alone until the result is waited for.
            send_sizes: elements for each member, may be 0.
            recv_sizes: elements from each member: what its own send_sizes says for this rank.

        Returns:
            Pending of [sum(recv_sizes)], the pieces in member order.

        Raises:
            ShapeError: `t` has not sum(send_sizes) elements, or not one size a member.
        """
        self._check_sizes("all_to_all", send_sizes)
        self._check_sizes("all_to_all", recv_sizes)
        _check_elements("all_to_all", t, sum(send_sizes))
        if self.size == 1:
            return Pending("all_to_all", (), t.detach().clone().view(-1))
        width = t.element_size()
        sends, receives = [n * width for n in send_sizes], [n * width for n in recv_sizes]
        source = self._outgoing(t)
        received = torch.empty(sum(receives), dtype=torch.uint8, device=self.device)
        with failures_as_comm_errors("all_to_all", self.ranks):
            work = dist.all_to_all_single(received, source, receives, sends, group=self.handle, async_op=True)
        self.traffic.add("all_to_all", sum(sends) - sends[self.index], sum(receives) - receives[self.index])
        if t.device == self.device:
            return Pending(
                "all_to_all", (work,), received.view(t.dtype), kept=source, waiting=self.transferring
            )
        result = torch.empty(sum(recv_sizes), dtype=t.dtype, device=t.device)
        return Pending("all_to_all", (work,), result, kept=source, staged=received, waiting=self.transferring)

    def broadcast(self, t: Tensor, src_index: int) -> Tensor:
        """Overwrite the contiguous `t` of every member with that of member `src_index`; returns `t`."""
        if self.size == 1:
            return t
        is_source = self.index == src_index
        buffer, staged = self._landing(t)
        if is_source and staged is not None:
            buffer.copy_(bytes_of(t))
        with self.transferring("broadcast"):
            dist.broadcast(buffer, group=self.handle, group_src=src_index)
        n_bytes = buffer.numel()
        self.traffic.add("broadcast", n_bytes * (self.size - 1) * is_source, n_bytes * (not is_source))
        return Pending("broadcast", (), t, staged=staged).wait()

    # ---- point to point (not collective) ----------------------------------------------------------
    def isend(self, t: Tensor, dst_index: int) -> Pending:
        """Start sending `t` to another member; leave `t` alone until waited for. `wait` returns `t`.

        Over NCCL two members that both send before they receive wait for each other: use `exchange`.
        """
        self._check_peer("isend", dst_index)
        source = self._outgoing(t)
        with failures_as_comm_errors("isend", self.ranks):
            work = dist.isend(source, group=self.handle, group_dst=dst_index)
        self.traffic.add("send", source.numel(), 0)
        return Pending("isend", _started(work), t, kept=source, waiting=self.transferring)

    def irecv(self, t: Tensor, src_index: int) -> Pending:
        """Start receiving into the contiguous `t`; messages of one pair of members arrive in the order they
        were sent. `wait` returns `t`."""
        self._check_peer("irecv", src_index)
        buffer, staged = self._landing(t)
        with failures_as_comm_errors("irecv", self.ranks):
            work = dist.irecv(buffer, group=self.handle, group_src=src_index)
        self.traffic.add("recv", 0, buffer.numel())
        return Pending("irecv", _started(work), t, kept=buffer, staged=staged, waiting=self.transferring)

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> list[Tensor]:
        """Send and receive as one batch that cannot deadlock, and wait for all of it.

        Args:
            sends: (tensor, dst_index) pairs.
            receives: (contiguous tensor to fill, src_index) pairs.

        Returns:
            The filled tensors, in the order of `receives`.
        """
        ops, arrivals = [], []
        for t, peer in sends:
            self._check_peer("exchange", peer)
            source = self._outgoing(t)
            self.traffic.add("send", source.numel(), 0)
            ops.append(dist.P2POp(dist.isend, source, group=self.handle, group_peer=peer))
        for t, peer in receives:
            self._check_peer("exchange", peer)
            buffer, staged = self._landing(t)
            self.traffic.add("recv", 0, buffer.numel())
            ops.append(dist.P2POp(dist.irecv, buffer, group=self.handle, group_peer=peer))
            arrivals.append(Pending("exchange", (), t, kept=buffer, staged=staged))
        with self.transferring("exchange"):
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        return [arrival.wait() for arrival in arrivals]

    # ---- reductions that have no order ------------------------------------------------------------
    def all_reduce_int(self, t: Tensor) -> Tensor:
        """Sum of an integer tensor over the members, same shape and dtype; wraps on overflow.

        Exact in any order. Made of an all-gather: meant for counts, costs size x bytes.

        Raises:
            ShapeError: `t` is not of an integer dtype.
        """
        if t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool:
            raise ShapeError(
                f"all_reduce_int: got {t.dtype}; takes integer dtypes only\n"
                "hint: sum floating-point values with OrderedReducer, which fixes the order"
            )
        return self.all_gather(t).sum(dim=0, dtype=t.dtype)

    def all_reduce_max(self, t: Tensor) -> Tensor:
        """Elementwise maximum over the members, same shape and dtype.

        The bits do not depend on the order or on who held what: NaN in any member gives NaN, and a zero
        result is +0 (max(-0, +0) is whichever the hardware likes). Made of an all-gather: costs size x bytes.
        """
        largest = reduce(torch.maximum, self.all_gather(t).unbind())
        return largest + 0.0 if t.dtype.is_floating_point else largest

    def all_gather_object(self, item: Any) -> list[Any]:
        """Every member's picklable `item`, in member order. Members trust each other: this unpickles."""
        if self.size == 1:
            return [item]
        payload = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        sizes = [int(n) for n in self.all_gather(torch.tensor([payload.numel()]))]
        gathered = bytes(self.all_gather_uneven(payload, sizes).numpy())
        starts = [sum(sizes[:member]) for member in range(self.size)]
        return [pickle.loads(gathered[start : start + n]) for start, n in zip(starts, sizes, strict=True)]

    def barrier(self) -> None:
        """Return once every member has called it."""
        if self.size == 1:
            return
        with self.transferring("barrier"):
            dist.barrier(
                group=self.handle, device_ids=None if self.device.index is None else [self.device.index]
            )

    # ---- bytes in, bytes out ----------------------------------------------------------------------
    def _outgoing(self, t: Tensor) -> Tensor:
        return bytes_of(t.detach().contiguous()).to(self.device)

    def _landing(self, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where the backend writes, and the same again if it must be copied to `t` afterwards."""
        if not t.is_contiguous():
            raise ShapeError(
                f"cannot receive into a tensor of strides {t.stride()}; needs a contiguous tensor"
            )
        if t.device == self.device:
            return bytes_of(t), None
        staged = torch.empty(t.numel() * t.element_size(), dtype=torch.uint8, device=self.device)
        return staged, staged

    def _check_sizes(self, kind: str, sizes: Sequence[int]) -> None:
        if len(sizes) != self.size or min(sizes) < 0:
            raise ShapeError(
                f"{kind}: got sizes {list(sizes)}; needs {self.size}, one a member, none negative"
            )

    def _check_peer(self, kind: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.index:
            raise CommError(
                f"{kind}: got peer {peer} for member {self.index} of {self.size}; needs another member"
            )


def _check_elements(kind: str, t: Tensor, expected: int) -> None:
    if t.numel() != expected:
        raise ShapeError(f"{kind}: got a tensor of {t.numel()} elements; the sizes say {expected}")


def _started(work: dist.Work | None) -> tuple[dist.Work, ...]:
    return () if work is None else (work,)


class GroupFactory:
    """Makes the groups of a connected world; each distinct list of ranks once.

    Attributes:
        rank, world_size: this process among all.
        world: the group of all ranks.
    """

    def __init__(self, world: Group, timeout: timedelta, breaker: Breaker | None = None) -> None:
        self.world = world
        self.rank, self.world_size = world.ranks[world.index], world.size
        self._timeout = timeout
        self._breaker = breaker or Breaker()
        self._built: dict[tuple[str, tuple[int, ...]], Group | None] = {("", world.ranks): world}

    def build_groups(
        self, rank_lists: Iterable[Sequence[int]], channel: str = "", *, host: bool = False
    ) -> dict[tuple[int, ...], Group]:
        """Create the process groups of these lists; collective over the world.

        Every rank gives the same lists, in any order: they are made in sorted order. Torch names a group by
        how many it has made before, so ranks outside a list count it too; that costs them no communication.

        Args:
            rank_lists: global ranks, ascending in a list; repeats are allowed, lists of one rank are free.
            channel: the same list on another channel is another communicator.
            host: over Gloo and in host memory, whatever the world's backend is; for threads that must not
                touch the accelerator's communicators. Give such groups a channel of their own.

        Returns:
            Rank list -> group, for the lists that hold this rank.

        Raises:
            MeshError: a list is empty, not ascending, or names a rank outside the world.
        """
        wanted = sorted({tuple(ranks) for ranks in rank_lists})
        for ranks in wanted:
            if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= self.world_size:
                raise MeshError(
                    f"group of ranks {list(ranks)}: needs ascending ranks in 0..{self.world_size - 1}"
                )
        for ranks in wanted:
            if (channel, ranks) not in self._built:
                self._built[channel, ranks] = self._create(ranks, host=host)
        mine = ((ranks, self._built[channel, ranks]) for ranks in wanted)
        return {ranks: group for ranks, group in mine if group is not None}

    def _create(self, ranks: tuple[int, ...], *, host: bool) -> Group | None:
        handle = None
        if len(ranks) > 1:
            with failures_as_comm_errors("new_group", ranks), self._breaker.connecting():
                handle = dist.new_group(list(ranks), timeout=self._timeout, backend="gloo" if host else None)
        if self.rank not in ranks:
            return None
        self._breaker.add(handle)
        group = Group(
            ranks=ranks,
            index=ranks.index(self.rank),
            handle=handle,
            device=_CPU if host else self.world.device,
            # A host group serves another thread, whose transfers are not what the training is doing.
            progress=Progress() if host else self.world.progress,
        )
        if group.device.type != "cpu":
            # NCCL and HCCL connect at the first call, which all members must then make: make it here.
            group.barrier()
        return group


@contextmanager
def connect(
    rank: int,
    world_size: int,
    backend: str = "gloo",
    *,
    store: Store | None = None,
    init_method: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    breaker: Breaker | None = None,
) -> Iterator[GroupFactory]:
    """Join the world, and leave it when the block ends. A world of one starts no backend.

    A block that ends with an error breaks the world: nothing of this rank is left in flight, and no rank is
    waited for.

    Args:
        rank, world_size: this process among all.
        backend: torch's name: "gloo" (device "cpu"), "nccl" (device "cuda:i"), "hccl" (device "npu:i").
        store, init_method: the rendezvous, exactly one of them; the environment is not read.
        timeout: after which a collective counts as failed.
        device: where the backend reads and writes.
        progress: is told of every transfer of every group.
        breaker: lets another thread end them all.

    Yields:
        The factory of this world's groups.

    Raises:
        CommError: no rendezvous was given, or the ranks did not meet.
    """
    progress, breaker = progress or Progress(), breaker or Breaker()
    if world_size == 1:
        yield GroupFactory(replace(Group.single(rank, device), progress=progress), timeout)
        return
    if (store is None) == (init_method is None):
        raise CommError(f"connect: got store={store}, init_method={init_method}; needs exactly one of them")
    where = torch.device(device)
    try:
        with failures_as_comm_errors("connect", range(world_size)), breaker.connecting():
            dist.init_process_group(
                backend,
                store=store,
                init_method=init_method,
                rank=rank,
                world_size=world_size,
                timeout=timeout,  # no device_id: with it, every rank must take part in making every group
            )
    except CommError:
        # Torch counts the failed attempt, and would look for its peers under another name the next time.
        dist.distributed_c10d._world.group_count = 0
        raise
    try:
        world = Group(
            ranks=tuple(range(world_size)),
            index=rank,
            handle=dist.group.WORLD,
            device=where,
            progress=progress,
        )
        breaker.add(dist.group.WORLD)
        world.barrier()  # a rank that fails early must not look like one that never came
        yield GroupFactory(world, timeout, breaker)
        world.barrier()  # a rank that closes its sockets early fails its peers' last collective
    except BaseException as error:
        # NCCL and HCCL destroy a communicator only after its transfers, whose peers may wait for this rank.
        breaker.break_now(f"{type(error).__name__} on rank {rank}")
        raise
    finally:
        breaker.release()
        dist.destroy_process_group()
