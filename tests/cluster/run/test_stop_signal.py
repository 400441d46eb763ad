"""StopSignal: what a signal does to a learner, and with which code it leaves."""

import os
import signal
import threading

import pytest

from envfleet import StopSignal
from envfleet.cluster.run import stop_signal


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    yield
    noted = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(noted, StopSignal) and noted.is_set:  # once it came, it stays noted
        signal.signal(signal.SIGTERM, before[0])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


@pytest.fixture
def checkpoint(tmp_path):
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_noted(checkpoint, number):
    with StopSignal(checkpoint) as stop:
        assert not stop.is_set and stop.exit_code == 0
        send(number)
        assert stop.is_set and stop.number == number
        checkpoint.write_text("saved")
    assert stop.exit_code == 75


def test_no_signal(checkpoint):
    with StopSignal(checkpoint) as stop:
        checkpoint.write_text("saved")
    assert stop.exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_who_saves_nothing_is_not_started_again(checkpoint, number, caplog):
    """It would begin at the same place again, for ever."""
    checkpoint.write_text("of the run before")
    with StopSignal(checkpoint) as stop, StopSignal() as without:
        send(number)
    assert without.exit_code == 128 + number
    assert stop.exit_code == 0  # the inner one had it
    with StopSignal(checkpoint) as stop:
        send(number)
    assert stop.exit_code == 128 + number
    assert "nothing was saved" in caplog.text
    checkpoint.unlink()
    assert stop.exit_code == 128 + number


def test_a_checkpoint_of_the_same_size_is_a_new_one(checkpoint):
    checkpoint.write_text("one")
    with StopSignal(checkpoint) as stop:
        send(signal.SIGUSR1)
        new = checkpoint.with_suffix(".new")
        new.write_text("two")
        os.utime(new, ns=(checkpoint.stat().st_atime_ns, checkpoint.stat().st_mtime_ns))
        new.rename(checkpoint)
    assert stop.exit_code == 75


def test_a_second_sigterm_ends_the_process_but_not_the_same_one_twice(monkeypatch):
    with StopSignal() as stop:
        send(signal.SIGUSR1)  # the time limit is near; then it is reached
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stop.number == signal.SIGUSR1
        monkeypatch.setattr(stop_signal, "SAME_S", 0.0)
        with pytest.raises(SystemExit) as ended:
            send(signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM


def test_handlers_of_others_stay():
    def mine(*_):
        pass

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with StopSignal():
            pass
        assert signal.getsignal(signal.SIGUSR1) is mine
        with StopSignal():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_in_another_thread_nothing_happens():
    stops = []

    def body():
        with StopSignal() as stop:
            stops.append(stop)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)
    assert stops[0].exit_code == 0


def test_sigterm_that_is_passed_on_again_while_the_cluster_closes(checkpoint):
    with StopSignal(checkpoint) as stop:
        send(signal.SIGTERM)
        checkpoint.write_text("saved")
    send(signal.SIGTERM)  # would end this process
    assert stop.exit_code == 75
