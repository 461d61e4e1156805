"""What runs in the process of one learner rank on a Ray cluster, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import ray
import torch

from posttrain.distributed.remote_learner import LearnerCall
from posttrain.distributed.worker import (
    LearnerHost,
    LearnerRequest,
    compute_deterministically,
    peer_gone,
)
from posttrain.learn.ranks import ALONE, connect

GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
# Where gloo and NCCL read the interface by which the ranks talk; "=": no other that begins so.
INTERFACES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class PeerLost:
    """The answer of a rank that could not go on without another one."""

    why: str


class LearnerRank:
    """One rank of a learner: joins the others, builds its part, and does what all are asked."""

    def __init__(
        self, rank: int, *, size: int, threads: int, deterministic: bool, on_gpu: bool
    ) -> None:
        self._rank, self._size, self._threads = rank, size, threads
        self._store: Any = None
        self._ranks = ALONE
        self._host: LearnerHost | None = None
        if not on_gpu:  # Ray hides none from an actor that asked for none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if deterministic:
            compute_deterministically()

    def place(self) -> tuple[int, str]:
        """Its process, and the address of its node."""
        return os.getpid(), ray.util.get_node_ip_address()

    @ray.method(concurrency_group="watch")
    def alive(self) -> bool:
        """Answers while a call is under way, unless the process itself stands still."""
        return True

    def listen(self, deadline: float) -> tuple[str, int]:
        """Where the ranks meet: a port of this node's address, and of no other interface."""
        _, address = self.place()
        door = socket.create_server((address, 0))
        port = door.getsockname()[1]
        self._store = torch.distributed.TCPStore(
            address,
            port,
            self._size,
            is_master=True,
            timeout=timedelta(seconds=deadline),
            wait_for_workers=False,
            master_listen_fd=door.detach(),
        )
        return address, port

    def join(self, place: tuple[str, int], deadline: float) -> PeerLost | None:
        """Meet the other ranks there."""
        _, own = self.place()
        for variable in INTERFACES.keys() - os.environ.keys():
            os.environ[variable] = INTERFACES[variable] + interface_of(own)
        return self._or_lost("join", lambda: self._connect(place, deadline))

    def _connect(self, place: tuple[str, int], deadline: float) -> None:
        store = self._store or torch.distributed.TCPStore(
            *place, self._size, is_master=False, timeout=timedelta(seconds=deadline)
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # The driver's own deadline comes first: it knows which rank it waits for.
        self._ranks = connect(
            device, deadline=2 * deadline, store=store, rank=self._rank, world_size=self._size
        )

    def build(self, request: LearnerRequest) -> PeerLost | None:
        """Build this rank's part of the learner."""
        torch.set_num_threads(self._threads)
        self._host = host = self._host or LearnerHost(self._ranks)
        return self._or_lost("build", lambda: host.build(request))

    def call(self, asked: LearnerCall) -> Any:
        """Do one call; rank 0 gives the answer, which is the same in all."""
        torch.set_num_threads(self._threads)  # of this thread, which may be a new one
        assert self._host is not None, "build comes first"
        host = self._host
        return self._or_lost(asked.name, lambda: host.answer(asked))

    def _or_lost(self, doing: str, do: Callable[[], Answer]) -> Answer | PeerLost:
        """What it comes to, or that another rank was lost while this one did it."""
        try:
            return do()
        except RuntimeError as error:
            if self._size > 1 and peer_gone(error):
                return PeerLost(f"{doing}: {error}")
            raise


def interface_of(address: str) -> str:
    """The network interface that has an address; gloo would go by what the host's name means.

    >>> interface_of("127.0.0.1") in ("lo", "lo0")
    True
    """
    import fcntl

    if address.startswith("127."):
        address = "127.0.0.1"  # the loopback interface has all of these
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address of its own
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(asked.fileno(), GET_ADDRESS, request)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    raise ValueError(
        f"cluster: no network interface of {socket.gethostname()} has the address {address} by "
        f"which Ray knows it; set {' and '.join(INTERFACES)} on that node to the interface that "
        "the other nodes reach, or start Ray there with --node-ip-address"
    )
