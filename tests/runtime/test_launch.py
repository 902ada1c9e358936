"""Ranks that nobody launches together say who does not come, within bind's own time."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from autoptd.runtime import launch
from tests.runtime.chain import Chain

LIMIT = 0.1  # seconds, of which bind has ten times as many


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(number))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return number


def test_rank_0_says_that_the_others_do_not_come(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="1/2 clients joined"):
        launch._make_watchdog(Chain((1, 2, 1)).manifest, LIMIT)


@pytest.mark.parametrize("comes", [False, True], ids=["does not come", "ends"])
def test_the_others_name_rank_0(comes: bool, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    if comes:
        served = [TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)]

        def end() -> None:
            time.sleep(0.3)
            served.clear()

        threading.Thread(target=end).start()
    with pytest.raises(RuntimeError, match=rf"not reached in bind, .* rank 0 .*127\.0\.0\.1:{port}"):
        launch._make_watchdog(Chain((1, 2, 1)).manifest, 50 * LIMIT if comes else LIMIT)
