"""Sessions: unguessable, bounded, and over when nobody uses them."""

from fakes.rig import Clock
from headway_console.sessions import Sessions


def test_a_session_is_found_by_its_cookie_until_it_is_closed():
    sessions = Sessions(Clock())
    session = sessions.open("Bearer hw_x")
    assert sessions.find(session.id) is session
    sessions.close(session.id)
    assert sessions.find(session.id) is None


def test_no_two_are_alike_and_none_shows_its_token():
    sessions = Sessions(Clock())
    one, other = sessions.open("Bearer hw_secret"), sessions.open("Bearer hw_secret")
    assert len({one.id, other.id, one.csrf, other.csrf}) == 4
    assert "hw_secret" not in repr(one)
    assert one.csrf not in repr(one)
    assert one.proves(one.csrf)
    assert not one.proves(other.csrf)
    assert not one.proves("")
    assert not one.proves("\ud800")


def test_what_is_not_used_is_over():
    clock = Clock()
    sessions = Sessions(clock, idle_s=60.0)
    session = sessions.open(None)
    for _ in range(5):
        clock.now += 50
        assert sessions.find(session.id) is session
    clock.now += 61
    assert sessions.find(session.id) is None
    assert len(sessions) == 0


def test_there_are_never_too_many_and_the_one_used_longest_ago_goes():
    sessions = Sessions(Clock(), most=3)
    first, second, third = (sessions.open(None) for _ in range(3))
    sessions.find(first.id)
    sessions.open(None)
    assert len(sessions) == 3
    assert sessions.find(first.id) is first
    assert sessions.find(second.id) is None
    assert sessions.find(third.id) is third
