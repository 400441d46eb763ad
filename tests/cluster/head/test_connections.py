"""Connections: a process is answered on the newest connection on which it was heard."""

from envfleet.cluster.head.connections import Connections


def test_a_process_is_answered_where_it_was_heard():
    connections = Connections()
    assert connections.newest(b"p") is None
    assert connections.heard(b"a", b"p")
    assert not connections.heard(b"a", b"p"), "that is no news"
    assert connections.newest(b"p") == b"a"


def test_a_new_connection_replaces_the_old_one_which_may_still_bring_messages():
    connections = Connections()
    connections.heard(b"a", b"p")
    assert connections.heard(b"b", b"p")
    assert not connections.heard(b"a", b"p"), "what was under way when it broke"
    assert connections.newest(b"p") == b"b"


def test_the_old_one_counts_again_if_the_new_one_is_gone():
    connections = Connections()
    connections.heard(b"a", b"p")
    connections.heard(b"b", b"p")
    connections.closed(b"b")
    assert connections.newest(b"p") is None
    assert connections.heard(b"a", b"p")
    assert connections.newest(b"p") == b"a"


def test_an_old_connection_closes_after_the_new_one_has_opened():
    connections = Connections()
    connections.heard(b"a", b"p")
    connections.heard(b"b", b"p")
    connections.closed(b"a")
    connections.closed(b"a")
    assert connections.newest(b"p") == b"b"


def test_what_is_remembered_is_bounded():
    connections = Connections(most=3)
    for index in range(10):
        connections.heard(bytes([index]), b"p%d" % index)
    assert [connections.newest(b"p%d" % index) is not None for index in range(10)] == [False] * 7 + [True] * 3
    assert connections.heard(bytes([0]), b"p0"), "it is known again with its next message"


def test_a_connection_has_one_name_at_a_time():
    connections = Connections(most=3)
    for index in range(10):
        connections.heard(b"a", b"p%d" % index)
    assert [index for index in range(10) if connections.newest(b"p%d" % index) is not None] == [9]
