"""A stranger at rank 0's board: he reads, writes and copies there as he likes, and decides nothing."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from holdfast.base.wire import encode_error
from holdfast.core.group import board as of_boards
from holdfast.core.group.board import Board
from holdfast.core.group.listening import TAKES_LISTENER
from holdfast.core.group.message_auth import KEY_BYTES, MARK_BYTES, Seal
from holdfast.core.group.store_requests import StoreLine
from holdfast.errors import HoldfastWarning, OutOfSpace

KEY = bytes(range(KEY_BYTES))
FORGED = b"\1" + encode_error(OutOfSpace("forged"))


@pytest.fixture
def store() -> dist.Store:
    """Any store of torch's: none has a password."""
    return dist.HashStore()


@pytest.fixture
def pair(store: dist.Store) -> list[Board]:
    return boards(store, Seal(KEY))


def boards(store: dist.Store, seal: Seal) -> list[Board]:
    made = [Board(rank, 2, 60.0, seal) for rank in range(2)]
    for board in made:
        board._line = StoreLine(lambda: store, "rank 0", 0)
    return made


def asked(pair: list[Board], key: str) -> list[bytes]:
    """What both ranks hear when rank 0 joins what they say."""
    with ThreadPoolExecutor(2) as pool:
        said = [
            pool.submit(board.ask, key, b"%d" % board.rank, lambda all_said: b"".join(all_said))
            for board in pair
        ]
        return [one.result() for one in said]


@pytest.mark.parametrize(
    "forged",
    [FORGED, b"", b"\0" * MARK_BYTES, Seal(b"").close("x/1", b"no")],
    ids=["unmarked", "empty", "zeros", "another key"],
)
@pytest.mark.parametrize("place", ["x/1/answer", "x/1/1"])
def test_what_a_stranger_has_written_first_does_not_count(
    pair: list[Board], store: dist.Store, place: str, forged: bytes
) -> None:
    store.set(place, forged)
    reader = pair[1] if place == "x/1/answer" else pair[0]
    with pytest.warns(HoldfastWarning, match=f"^{place} on rank 0's board was not written by a"):
        assert reader.peek(place) is None
    assert asked(pair, "x/1") == [b"01", b"01"]


def test_a_message_counts_in_its_own_place_on_its_own_board_alone(
    pair: list[Board], store: dist.Store
) -> None:
    pair[0].post("stop", b"7")
    store.set("other", store.get("stop"))
    assert pair[1].peek("stop") == b"7"
    for reader, place in (
        (pair[1], "other"),
        (boards(store, Seal(bytes(KEY_BYTES)))[1], "stop"),
    ):
        with pytest.warns(HoldfastWarning, match="was not written by a rank of this run"):
            assert reader.peek(place) is None


def test_no_byte_of_a_message_can_be_changed(pair: list[Board], store: dist.Store) -> None:
    pair[0].post("stop", b"7")
    sent = store.get("stop")
    changed = [sent[:i] + bytes([sent[i] ^ 1]) + sent[i + 1 :] for i in range(len(sent))]
    pair[1]._has_told = True  # else each would have to be caught
    for forged in (*changed, sent[:-1], sent + b"0"):
        store.set("stop", forged)
        assert pair[1].peek("stop") is None


def test_the_first_message_is_the_first_of_a_rank(pair: list[Board], store: dist.Store) -> None:
    pair[0].post_first("base", b"1")
    pair[1].post_first("base", b"2")
    assert [board.peek("base") for board in pair] == [b"1", b"1"]


def test_what_is_hidden_cannot_be_read() -> None:
    token, seal = "0123456789abcdef" * 4, Seal(KEY)
    hidden = seal.hide(token)
    assert token not in hidden and token[:16] not in hidden
    assert seal.reveal(hidden) == token
    assert hidden == seal.hide(token), "ranks of one agent have equal cards"
    assert hidden != Seal(bytes(KEY_BYTES)).hide(token)
    with pytest.raises(ValueError, match="another key"):
        Seal(bytes(KEY_BYTES)).reveal(hidden)


def test_a_node_alone_listens_to_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    host, _, listener = of_boards._place(2)
    assert host == "127.0.0.1" and (listener is not None) == TAKES_LISTENER
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert of_boards._place(2)[2] is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert of_boards._place(2)[2] is None


def test_it_is_known_whether_stores_take_a_listening_socket() -> None:
    """Where they do not, they say so, and rank 0 does not try."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    try:
        store = dist.TCPStore(
            host, port, None, True, wait_for_workers=False, use_libuv=True,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except NotImplementedError:
        assert not TAKES_LISTENER
    else:
        assert TAKES_LISTENER and store.port == port
