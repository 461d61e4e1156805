"""One rank of a learner, in this process: what it says of a lost one, and how it is reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain.distributed import ray_rank
from posttrain.distributed.ray_rank import LearnerRank, PeerLost, interface_of
from posttrain.distributed.remote_learner import LearnerCall
from posttrain.distributed.worker import LearnerHost
from posttrain.learn.ranks import Ranks

LOST = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4242"


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> LearnerRank:
    """The second of two, at this machine's own address."""
    for variable in ray_rank.INTERFACES:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(LearnerRank, "place", lambda self: (1, "127.0.0.1"))
    monkeypatch.setattr(torch.distributed, "TCPStore", lambda *given, **options: None)
    threads = torch.get_num_threads()
    return LearnerRank(1, size=2, threads=threads, deterministic=False, on_gpu=True)


def raises(error: Exception) -> Callable[..., Any]:
    def raised(*given: Any, **options: Any) -> Any:
        raise error

    return raised


DOES: dict[str, Callable[[LearnerRank], Any]] = {
    "join": lambda rank: rank.join(("127.0.0.1", 1), 1.0),
    "build": lambda rank: rank.build(None),  # type: ignore[arg-type]
    "step": lambda rank: rank.call(LearnerCall("step")),
}


def fail(monkeypatch: pytest.MonkeyPatch, rank: LearnerRank, error: Exception) -> None:
    rank._host = LearnerHost(Ranks(1, 2))
    monkeypatch.setattr(ray_rank, "connect", raises(error))
    monkeypatch.setattr(LearnerHost, "build", raises(error))
    monkeypatch.setattr(LearnerHost, "call", raises(error))


@pytest.mark.parametrize("doing", DOES)
@pytest.mark.parametrize("kind", [RuntimeError, torch.distributed.DistStoreError])
def test_whatever_it_does_a_lost_peer_is_no_error_of_its_own(
    rank: LearnerRank, monkeypatch: pytest.MonkeyPatch, doing: str, kind: type[Exception]
) -> None:
    text = LOST if kind is RuntimeError else "wait timeout after 1000ms, keys: /0"
    fail(monkeypatch, rank, kind(text))
    assert DOES[doing](rank) == PeerLost(f"{doing}: {text}")


@pytest.mark.parametrize("doing", DOES)
def test_an_error_of_its_own_stays_one(
    rank: LearnerRank, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    fail(monkeypatch, rank, RuntimeError("peer review: no such model"))
    with pytest.raises(RuntimeError, match="no such model"):
        DOES[doing](rank)


def test_gloo_and_nccl_go_by_the_interface_of_the_node_unless_told(
    rank: LearnerRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_rank, "connect", lambda *given, **options: Ranks(1, 2))
    assert rank.join(("127.0.0.1", 1), 1.0) is None
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface_of('127.0.0.1')}"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert rank.join(("127.0.0.1", 1), 1.0) is None
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_an_address_of_no_interface_is_an_error_that_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"192\.0\.2\.1 .*set GLOO_SOCKET_IFNAME and NCCL_SOCKET"):
        interface_of("192.0.2.1")  # an address for documentation, which no machine has
    assert interface_of("127.3.2.1") in dict(socket.if_nameindex()).values()
