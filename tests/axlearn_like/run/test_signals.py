import os
import signal
import threading

import pytest

from axlearn_like.run.signals import graceful_stop


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_flag_and_the_old_handlers_come_back(signum):
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with graceful_stop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signum)
        assert stop.requested
        assert stop.reason == signum.name
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_second_ctrl_c_aborts_but_a_second_sigterm_does_not():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), graceful_stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_other_threads_ask_by_hand():
    seen = []

    def body() -> None:
        with graceful_stop() as stop:
            stop.request()
            seen.append(stop.reason)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == ["SIGTERM"]
