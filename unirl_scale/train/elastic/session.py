"""Training on one view after another, in one process."""

from __future__ import annotations

import gc
import socket
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from unirl_scale.comm.breaker import Breaker
from unirl_scale.comm.groups import GroupFactory, connect
from unirl_scale.core.check import world_size_of
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import CommError, MembershipChanged, MeshError, UniRLError
from unirl_scale.core.lottery import describe_layout
from unirl_scale.core.progress import Progress
from unirl_scale.core.ranks import RankInfo
from unirl_scale.core.relayout import relayout
from unirl_scale.train.boundary import Boundary
from unirl_scale.train.elastic.directory import Directory
from unirl_scale.train.elastic.hub import Rules
from unirl_scale.train.elastic.links import own_address
from unirl_scale.train.elastic.membership import Membership, Pace, Seat
from unirl_scale.train.elastic.timeline import Timeline
from unirl_scale.train.elastic.view import View
from unirl_scale.train.loop import agree, end_if_asked, train
from unirl_scale.train.metrics import Reporter, SilentReporter
from unirl_scale.train.rundir import RunDir, hold
from unirl_scale.train.setup import Setup, prepare, transport
from unirl_scale.train.stopping import StopRequest

_CONNECT_S = 5.0
_DONE_S = 10.0  # from the last collective until every rank has said that it is done


def elastic_dir(cfg: RunConfig) -> Path:
    """Where a run keeps its views and the events of its recoveries."""
    return Path(cfg.run_dir) / "elastic"


def run_elastic(
    cfg: RunConfig, rank_info: RankInfo, reporter: Reporter, stop: StopRequest, progress: Progress
) -> int | None:
    """Train a resolved, legal configuration as one process of a job whose ranks may come and go.

    Args:
        rank_info: the place that the launcher gave; `rank` is the slot, which may be beyond the ranks that
            the meshes span: a spare.
        reporter: used while this process is rank 0 of a view.
        progress: may come with observers, e.g. faults of a test.

    Returns:
        The rank in the last view; None for a process that had none.

    Raises:
        ElasticError: the job cannot go on.
        ConfigError: another job has taken the run directory.
        Stopped: `stop` asked for it.
    """
    setup = prepare(cfg)
    gc.freeze()  # what is there now stays; a collection between views need not look at it
    progress.observers = (*progress.observers, stop.observe)
    meets_at = rank_info.master_addr
    stores = _Stores(own_address(meets_at))
    seat = Seat(
        slot=rank_info.rank,
        node="unknown" if rank_info.node_rank is None else str(rank_info.node_rank),
        run=rank_info.job,
        meets_at=meets_at,
    )
    elastic, directory = cfg.elastic, Directory(elastic_dir(cfg))
    pace = Pace(
        interval_s=elastic.heartbeat_interval_s,
        timeout_s=elastic.heartbeat_timeout_s,
        stall_timeout_s=elastic.stall_timeout_s,
    )
    rules = hub_rules(setup.cfg, directory, stores)
    with ExitStack() as held, Membership(seat, pace, rules, directory, progress) as membership:
        stop.on_request = membership.interrupt
        session = _Session(setup, rank_info, reporter, stop, membership, held)
        try:
            return session.run()
        except UniRLError as error:
            if stop.signum:
                membership.leave()  # those who were not asked go on; where all were, nobody is missed
            end_if_asked(stop, error)
            raise


def hub_rules(cfg: RunConfig, directory: Directory, stores: _Stores) -> Rules:
    """The configuration as the hub sees it."""
    elastic = cfg.elastic

    def usable(ranks: int) -> int:
        try:
            return world_size_of(relayout(cfg, ranks))
        except MeshError:
            return 0

    return Rules(
        world=world_size_of(cfg),
        min_ranks=elastic.min_ranks,
        usable=usable,
        max_restarts_per_step=elastic.max_restarts_per_step,
        heartbeat_timeout_s=elastic.heartbeat_timeout_s,
        regroup_timeout_s=elastic.regroup_timeout_s,
        wait_timeout_s=elastic.wait_timeout_s,
        claim=directory.claim,
        open_store=stores.open,
    )


class _Stores:
    """The hub's stores. Each view meets in a fresh one, so that it finds nothing of a view that failed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._store: dist.TCPStore | None = None  # served for as long as it is referenced

    def open(self) -> str:
        self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        return f"{self._address}:{self._store.port}"


class _Session:
    """The views of one process, one after another."""

    def __init__(
        self,
        setup: Setup,
        rank_info: RankInfo,
        reporter: Reporter,
        stop: StopRequest,
        membership: Membership,
        held: ExitStack,
    ) -> None:
        self.setup, self.rank_info, self.reporter = setup, rank_info, reporter
        self.stop, self.membership, self.held = stop, membership, held
        self._holds = False  # the run directory
        self.timeline: Timeline | None = None
        self.boundary = Boundary(stop, lambda: membership.regroup)

    def run(self) -> int | None:
        """View after view, until training is complete."""
        complete, error = False, ""
        while not complete:
            found = self.membership.next_view(self.boundary.step, error)
            if found is None:
                return None
            view, breaker = found
            complete, error = self._on_view(view, breaker)
            if not complete:
                gc.collect()  # the engines of the view that ended, before the next ones are built
        self.membership.done(_DONE_S)
        return view.rank_of(self.membership.me.uid)

    def _on_view(self, view: View, breaker: Breaker) -> tuple[bool, str]:
        """Train until the end, or until the view ends; (whether training is complete, what failed here).

        Nothing of the view outlives the call, so no exception does: its traceback would hold the engines.
        """
        try:
            with self._join(view, breaker) as factory, torch.no_grad():
                self._train(view, factory)
        except MembershipChanged:
            return False, ""
        except CommError as error:
            return False, str(error)
        return True, ""

    def _train(self, view: View, factory: GroupFactory) -> None:
        cfg = relayout(self.setup.cfg, factory.world_size)
        again = bool(view.reason)
        if again and cfg.checkpoint.resume in ("never", "must"):  # which meant the start of the job
            cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, resume="auto"))
        reporter: Reporter = SilentReporter()
        if factory.rank == 0:
            self._hold_run_dir()
            reporter, layout = self.reporter, describe_layout(cfg.mesh)
            for loss in view.losses:
                reporter.warn(f"lost {loss}")
            if again:
                reporter.note(f"view {view.incarnation}: {factory.world_size} ranks, {layout}")
            self._time(view, layout, elastic_dir(cfg) / "events.jsonl")
        agree(factory.world, self.setup.task)
        info = replace(self.rank_info, rank=factory.rank, world_size=factory.world_size)
        train(self.setup, cfg, info, factory, reporter, self.stop, self.boundary, again=again)

    def _hold_run_dir(self) -> None:
        """The rank 0 that held it may be lost; where our own launcher holds it, that ends with the job."""
        if self.rank_info.launcher == "local" or self._holds:
            return
        with ExitStack() as attempt:
            run_dir = RunDir(Path(self.setup.cfg.run_dir))
            self._holds = attempt.enter_context(hold(run_dir, self.rank_info.job))
            if self._holds:
                self.held.enter_context(attempt.pop_all())

    def _time(self, view: View, layout: str, file: Path) -> None:
        """Note what this view takes to its first step, in place of the last view's timeline."""
        seen, progress = self.membership.seen, self.membership.progress
        others = tuple(o for o in progress.observers if self.timeline is None or o != self.timeline.observe)
        self.timeline = Timeline(file, view, layout, seen.stopped_s, seen.formed_s)
        progress.observers = (*others, self.timeline.observe)

    def _join(self, view: View, breaker: Breaker) -> AbstractContextManager[GroupFactory]:
        rank = view.rank_of(self.membership.me.uid)
        assert rank is not None
        backend, device = transport(self.setup.cfg.hardware)
        return connect(
            rank,
            len(view.members),
            backend,
            store=_client(view.store) if len(view.members) > 1 else None,
            timeout=timedelta(minutes=10),
            device=device,
            progress=self.membership.progress,
            breaker=breaker,
        )


def _client(address: str) -> dist.TCPStore:
    """Raises:
    CommError: the hub that opened the store is gone.
    """
    host, _, port = address.rpartition(":")
    try:
        # Torch's client tries for minutes where nobody listens; this one does not.
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise CommError(f"store {address}: {error}") from error
